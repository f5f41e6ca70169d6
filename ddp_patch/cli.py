"""Start the command line, ``ddp-patch audit``.

Arguments, tables and pictures come from click, rich and matplotlib, which ``pip install 'ddp-patch[audit]'`` brings.
"""

import sys
from pathlib import Path

__all__ = ["main"]

# Of the libraries that the extra brings.
_NEEDED = {"click", "matplotlib", "rich"}


def main() -> None:
    """Run the command line; without the libraries that it needs, say what to install and exit with 2."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does: for what targets import later, and for real ranks, too
    try:
        from ddp_patch.auditing.commands import commands

        commands(prog_name="ddp-patch")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _NEEDED:
            raise
        sys.stderr.write(
            f"ddp-patch needs the package {package}, which is not installed: the library itself does without it. "
            "Run: pip install 'ddp-patch[audit]'\n"
        )
        sys.exit(2)
