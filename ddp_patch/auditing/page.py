"""Write reports as one HTML page with figures, which loads nothing from elsewhere."""

from collections.abc import Mapping

from ddp_patch.auditing.provenance import Provenance
from ddp_patch.auditing.report import Report
from ddp_patch.auditing.show.drawing import PATTERNS
from ddp_patch.auditing.show.section import STYLE, facts_html

__all__ = ["page"]

_PAGE = """
:root { color-scheme: light dark; --ink: #1c2330; --line: #c9d0da; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --line: #465063; --paper: #12161d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 72rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
body:has(.ddp-beside) { max-width: 96rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
main > *, footer { margin-top: 2rem; border-top: 2px solid var(--line); padding-top: 1.25rem; }
"""


def page(reports: Mapping[str, Report], provenance: Provenance) -> str:
    """Return reports as an HTML page that holds everything it shows.

    Args:
        reports: The reports by the places of their loaders, such as ``loaders.train``.
        provenance: When, how and with what they were made.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2), world_size=4)
        >>> html = page({"train": report}, Provenance("a test"))
        >>> html.count('class="ddp-figure'), "http" in html
        (3, False)
    """
    failed = sum(not report.verdict for report in reports.values())
    verdict = f"✘ {failed} of {len(reports)} FAIL" if failed else f"✔ {len(reports)} of {len(reports)} PASS"
    if any(report.patched is not None for report in reports.values()):
        verdict += " once patched"
    sections = "".join(report.html(place) for place, report in reports.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>DDP audit: {verdict}</title><style>{_PAGE}{STYLE}</style></head><body>{PATTERNS}<header>"
        f'<h1>DDP audit: <span class="{"ddp-bad" if failed else "ddp-good"}">{verdict}</span></h1></header>'
        f"<main>{sections}</main><footer>{facts_html(provenance.lines())}</footer></body></html>\n"
    )
