"""Take screenshots of the audit's pages and of the built documentation, and look for pages that are too wide.

``nox -s screenshots`` runs this. It writes PNG files into ``screenshots/``, and exits with 1 if a page is wider than
its window at 390 or 1280 pixels, so that it would have to be scrolled sideways. It also draws ``docs/card.png``.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from runpy import run_path
from threading import Thread
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from ddp_patch import audit
from ddp_patch.auditing.report import page

ROOT = Path(__file__).parents[1]
DOCS, SITE, OUT = ROOT / "docs", ROOT / "site", ROOT / "screenshots"
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
# The width that is lacking: to the page in its window, or to any part of it that does not scroll by itself.
OVERFLOW = """Math.max(...[...document.querySelectorAll("html, body, .ddp-report, .ddp-report *")]
    .filter(part => part.clientWidth > 0 && !part.closest("svg"))
    .map(part => part.scrollWidth - part.clientWidth))"""


def audits() -> dict[str, str]:
    """Return pages of audits: set-ups that pass and that fail, costs, and many ranks."""
    made = run_path(str(ROOT / "docs" / "examples" / "loaders.py"))
    reports: dict[str, Any] = {
        "passes": audit(made["train"], 8),
        "fails": audit(made["by_slices"], 4),
        "long": audit(made["texts"], 8, patch=False),
        "cost": audit(made["texts"], 4, epochs=1, cost=made["tokens"]),
        "ranks": audit(made["texts"], 96, epochs=1),
    }
    return {name: page({name: report}) for name, report in reports.items()}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, at a free port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Serve files and log nothing."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing."""


def pages() -> dict[str, str]:
    """Write the audits' pages into the output, and return the paths of all pages by name."""
    folder = SITE / "audits"
    folder.mkdir(exist_ok=True)
    for name, html in audits().items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    found = [path.relative_to(SITE) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"]
    return {"-".join(path.with_suffix("").parts).removesuffix("-index"): str(path) for path in found}


def too_wide(browser: Browser, address: str, paths: dict[str, str]) -> list[str]:
    """Take a screenshot of each page at each width, light and dark, and return what is wider than its window."""
    found = []
    for width in WIDTHS:
        for scheme in SCHEMES:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]  # literals
            for name, path in paths.items():
                tab = context.new_page()
                tab.goto(f"{address}/{path}")
                tab.screenshot(path=OUT / f"{name}-{width}-{scheme}.png", full_page=True)
                over = tab.evaluate(OVERFLOW)
                if over > 0:
                    found.append(f"{name} at {width} pixels, {scheme}: {over} pixels too wide")
                tab.close()
            context.close()
    return found


def draw_card(browser: Browser) -> None:
    """Draw the picture that is shown where a page of the site is linked to, from what ``docs/theme/card.html`` says."""
    tab = browser.new_page(viewport={"width": 1200, "height": 630})
    tab.goto((DOCS / "theme" / "card.html").as_uri())
    tab.screenshot(path=DOCS / "card.png")
    tab.close()


def main(browser: str) -> None:
    """Take the screenshots with a browser, and exit with 1 if a page is too wide."""
    warnings.simplefilter("ignore")
    OUT.mkdir(exist_ok=True)
    paths = pages()
    with served(SITE) as address, sync_playwright() as playwright:
        # Chromium refuses a sandbox to root; it is shown nothing but our own pages.
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        draw_card(started)
        found = too_wide(started, address, paths)
        started.close()
    print(f"{len(paths)} pages, {len(WIDTHS) * len(SCHEMES) * len(paths)} screenshots in {OUT.name}/")
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main(sys.argv[1])
