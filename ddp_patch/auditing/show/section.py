"""Show one report as HTML, on a page or in a notebook."""

from collections.abc import Sequence
from html import escape

from ddp_patch.auditing.problems import Problem
from ddp_patch.auditing.show.drawing import PATTERNS, figure_html, with_own_patterns
from ddp_patch.auditing.show.drawing import STYLE as FIGURES
from ddp_patch.auditing.show.figure import Figure

__all__ = ["STYLE", "beside", "facts_html", "notebook", "section"]

# Names no colour of texts and backgrounds: a page or a notebook, light or dark, has its own.
STYLE = (
    """
.ddp-report { min-width: 0; }
.ddp-report h2 { font-size: 1.25rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.ddp-beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2.5rem; }
.ddp-good, .ddp-bad { white-space: nowrap; }
.ddp-good { color: #1a8a4c; color: color-mix(in srgb, #1a9c54 65%, currentColor); }
.ddp-bad { color: #d3453c; color: color-mix(in srgb, #e0392f 65%, currentColor); }
.ddp-facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1rem; margin: .75rem 0; }
.ddp-facts dt { opacity: .8; font-weight: 400; } .ddp-facts dd { margin: 0; overflow-wrap: anywhere; }
.ddp-problem { border-left: 4px solid #d3453c; background: rgba(128, 138, 153, .12); padding: .5rem .9rem;
  margin: .75rem 0; }
.ddp-problem p { margin: .25rem 0; overflow-wrap: anywhere; }
@media (max-width: 34rem) { .ddp-facts { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .ddp-facts dd { margin-bottom: .5rem; } }
"""
    + FIGURES
)


def section(
    heading: str, ok: bool, problems: Sequence[Problem], facts: Sequence[tuple[str, str]], figures: Sequence[Figure]
) -> str:
    """Return a report as HTML: its verdict, the two most important figures, problems, facts, more figures.

    Args:
        heading: The name of the loader, and what was done with it.
        ok: Whether it passes.
        problems: What is wrong.
        facts: What was found, as pairs of a name and a text.
        figures: The figures, the most important one first.
    """
    mark = '<span class="ddp-good">✔ PASS</span>' if ok else '<span class="ddp-bad">✘ FAIL</span>'
    shown = [figure_html(figure) for figure in figures] or ["<p>No sample was seen, so there is nothing to show.</p>"]
    return (
        f'<section class="ddp-report"><h2>{escape(heading)} {mark}</h2>'
        f"{''.join(shown[:2])}{''.join(map(_problem, problems))}{facts_html(facts)}{''.join(shown[2:])}</section>"
    )


def beside(sections: Sequence[str]) -> str:
    """Return sections side by side, or one below the other where there is no room."""
    return f'<div class="ddp-beside">{"".join(sections)}</div>'


def notebook(sections: str) -> str:
    """Return sections with all that they need, to show in a notebook."""
    return f"<div><style>{STYLE}</style>{with_own_patterns(PATTERNS + sections)}</div>"


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Return pairs of a name and a text as a list."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="ddp-facts">{rows}</dl>'


def _problem(problem: Problem) -> str:
    return (
        f'<div class="ddp-problem"><p><strong class="ddp-bad">✘ {problem.kind}</strong> '
        f"({escape(problem.where)})</p><p>{escape(problem.what)} {escape(problem.why)}</p>"
        f"<p><strong>Remedy:</strong> {escape(problem.remedy)}</p></div>"
    )
