"""Start the command line: ``ddp-patch run`` and ``ddp-patch audit``.

The audit needs click and rich, which the extra ``audit`` installs.
"""

import sys
from pathlib import Path

__all__ = ["main"]

# The packages that the extra installs. If any other one is missing, the installation is not to blame.
_NEEDED = {"click", "rich"}
_INTERRUPTED = 130  # as shells say of a program that Ctrl-C ended: 128 and the signal's number


def main() -> None:
    """Run the command line; if a package it needs is missing, say what to install and exit with 2."""
    if sys.argv[1:2] == ["run"]:
        from ddp_patch.autopatching.command import run

        return run(sys.argv[2:])
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, so that targets and real ranks can import from here
    try:
        from ddp_patch.auditing.commands import commands

        commands(prog_name="ddp-patch")
    except KeyboardInterrupt:  # while it imports, which takes a second
        sys.stderr.write("Interrupted\n")
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _NEEDED:
            raise
        sys.stderr.write(
            f"ddp-patch audit needs the package {package}, which is not installed. The library itself works without "
            "it. Run: pip install click rich\n"
        )
        sys.exit(2)
    return None
