"""Compose a picture with matplotlib, twice: for light and for dark pages."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

__all__ = ["Draw", "Picture", "Theme", "compose", "put_legend"]


@dataclass(frozen=True, slots=True)
class Theme:
    """Choose the colours of a picture.

    Attributes:
        ink: Colours text and marks.
        soft: Colours axes and ticks.
        ground: Colours the background.
        fill: Colours what is there: cells that are got, and work.
    """

    ink: str
    soft: str
    ground: str
    fill: str


_LIGHT = Theme(ink="#1c2330", soft="#5a6475", ground="#f5f7fa", fill="#7fb3e6")
_DARK = Theme(ink="#e7ebf2", soft="#a5afbf", ground="#1b212b", fill="#2f6ca8")
Draw: TypeAlias = Callable[[Sequence[Axes], Theme], None]  # called with the panels, from the top


@dataclass(frozen=True, slots=True)
class Picture:
    """Hold a picture for a page.

    Attributes:
        title: What the picture shows.
        caption: How to read it.
        alt: What can be seen in it, for readers who do not see it.
        width: The width in pixels.
        light: The SVG for light pages.
        dark: The SVG for dark pages.
    """

    title: str
    caption: str
    alt: str
    width: int
    light: str
    dark: str

    def html(self) -> str:
        """Return the picture as HTML that loads nothing from elsewhere and follows the reader's choice of colours."""
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data_uri(self.dark)}">'
            f'<img src="{_data_uri(self.light)}" alt="{escape(self.alt)}" width="{self.width}"></picture>'
        )


def compose(
    title: str, caption: str, told: Sequence[str], draw: Draw, width: int, height: int, panels: int = 1
) -> Picture:
    """Draw a picture in both themes.

    Args:
        title: What the picture shows.
        caption: How to read it.
        told: What can be seen in it, in sentences without their stops.
        draw: Draws into the panels.
        width: The width in pixels.
        height: The height in pixels.
        panels: How many panels there are, one above the other, with one axis across.
    """
    light, dark = (_svg(draw, theme, width, height, panels) for theme in (_LIGHT, _DARK))
    return Picture(title, caption, "; ".join(told) + ".", width, light, dark)


def _svg(draw: Draw, theme: Theme, width: int, height: int, panels: int) -> str:
    # Keep text as text, and make the same file of the same epoch.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif", "hatch.color": theme.ink}
    with mpl.rc_context(settings | {"font.size": 12, "hatch.linewidth": 0.8}):  # type: ignore[arg-type]  # names are literals there
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained", facecolor=theme.ground)
        found = [*figure.subplots(panels, squeeze=False, sharex=True)[:, 0]]
        for axes in found:
            axes.set_facecolor(theme.ground)
            axes.tick_params(colors=theme.soft)
            for spine in axes.spines.values():
                spine.set_color(theme.soft)
        draw(found, theme)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def put_legend(axes: Axes, theme: Theme, marks: dict[str, str | None], side: Literal["left", "right"] = "left") -> None:
    """Say above a panel what fills and hatches mean.

    Args:
        axes: The panel.
        theme: The colours.
        marks: The hatch of each name; empty for a fill, None for a mark that the picture has not.
        side: Whether it stands above the panel's left or right end.
        side: Where the legend begins or ends.
    """
    handles: list[Any] = [
        Patch(facecolor="none" if hatch else theme.fill, edgecolor=theme.ink, hatch=hatch, label=name)
        for name, hatch in marks.items()
        if hatch is not None
    ]
    axes.legend(
        handles=handles,
        loc="lower left" if side == "left" else "lower right",
        bbox_to_anchor=(0 if side == "left" else 1, 1),
        ncols=len(handles),
        frameon=False,
        labelcolor=theme.ink,
        handlelength=2.5,
        handleheight=1.4,
    )


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
