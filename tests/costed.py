"""Options with what a cost is of and its window beside it, as the tables of the tests have them."""

from typing import Any

from ddp_patch import Cost

__all__ = ["costed"]


def costed(options: dict[str, Any]) -> dict[str, Any]:
    """Return them with one ``Cost`` made of ``cost``, ``of`` and ``window``."""
    about = {name: options[name] for name in ("of", "window") if name in options}
    rest = {name: value for name, value in options.items() if name not in about}
    return rest if rest.get("cost") is None or not about else rest | {"cost": Cost(rest["cost"], **about)}
