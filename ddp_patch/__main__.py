"""``python -m ddp_patch``.

Ctrl-C while Python imports the package for it prints a traceback: no code of this package can run before that.
"""

from _ddp_patch_command import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
