"""``python -m ddp_patch``."""

from ddp_patch.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
