"""``python -m ddp_patch``, and what each command of it imports: the audit needs click and rich, the extra ``audit``.

Ctrl-C while Python imports the package for it prints a traceback: no code of this package can run before that.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from _ddp_patch_command import main
from ddp_patch.errors import explain

__all__ = ["loaded"]

# The packages that the extra installs. If any other one is missing, the installation is not to blame.
_NEEDED = {"click", "rich"}


def loaded(arguments: Sequence[str]) -> Callable[[], object]:
    """Import what a command needs, and return what runs it; if a package is missing, say which and exit with 2.

    Args:
        arguments: The command's name and arguments.
    """
    if arguments[:1] == ["run"]:
        from ddp_patch.running.command import run

        return partial(run, arguments[1:])
    if arguments[:1] == ["explain"]:
        return partial(explain, arguments[1:])
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, so that targets and real ranks can import from here
    try:
        from ddp_patch.auditing.commands import commands
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _NEEDED:
            raise
        sys.stderr.write(
            f"ddp-patch audit needs the package {package}, which is not installed. The library itself works without "
            "it. Run: pip install click rich\n"
        )
        sys.exit(2)
    return partial(commands, [*arguments], prog_name="ddp-patch")


if __name__ == "__main__":
    main()
