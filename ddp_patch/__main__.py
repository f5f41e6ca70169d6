"""The command line, ``python -m ddp_patch``. The audit needs click and rich, which the extra ``audit`` installs.

Ctrl-C during the import of the package prints a traceback, because none of its code can run before.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from _ddp_patch_command import main
from ddp_patch.errors import explain

# The packages that the extra installs. The message about the extra would be wrong for any other missing package.
_NEEDED = {"click", "rich"}


def loaded(arguments: Sequence[str]) -> Callable[[], object]:
    """Import what a command needs, and return a function that runs the command; without click or rich, exit with 2.

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
