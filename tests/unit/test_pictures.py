"""The picture and the page: what they are drawn from, and that they say it."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

import audit_setups as setups
import numpy as np
import pytest
from audit_setups import Untouchable
from click.testing import CliRunner
from torch.utils.data import DataLoader, Sampler
from zoo import loader

from ddp_patch import audit
from ddp_patch.auditing import Pictured, Report
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.picture import alternative, svg
from ddp_patch.auditing.report import page


def audited(given: Any, world_size: int, **options: Any) -> Report:
    report: Report = audit(given, world_size, **options)
    return report


def shown(given: Any, world_size: int, **options: Any) -> Pictured:
    return audited(given, world_size, **options).pictured


def texts(drawn: str) -> list[str]:
    return [each.text for each in ElementTree.fromstring(drawn).iter() if each.text and each.text.strip()]  # noqa: S314 - ours


def drawn_texts(report: Report) -> list[str]:
    return texts(svg(report.pictured, "light"))


def plain(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), **options)


def test_the_picture_is_of_the_stream_of_one_process() -> None:
    """Five samples over two ranks: the first one again fills the last round."""
    found = shown(plain(5), 2)
    assert [*found.got] == [(1, 0, 1, 0, 1), (1, 1, 0, 1, 0)]
    assert found.seen == (0, 4, 1)
    assert [*found.often] == [(0,) * 5, (0, 1, 1, 1, 1), (1, 0, 0, 0, 0)]  # never, once, again


def test_a_sample_that_one_process_draws_twice_is_got_at_both_places_in_part() -> None:
    """One process draws 7, 8, 7, 9; rank 0 gets 7 and 7, and rank 1 gets 8, 7 and a 5 of nowhere."""

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        order = [7, 8, 7, 9] if world_size == 1 else [[7, 7], [8, 7, 5]][rank]
        return plain(10, sampler=order)

    found = shown(make, 2)
    assert [*found.got] == [(1, 0, 1, 0), (0.5, 1, 0.5, 0)]
    assert found.seen == (1, 2, 1)


@pytest.mark.parametrize(("n", "world_size"), [(121, 2), (1000, 3), (10007, 8), (3000, 300), (2000, 12)])
def test_a_long_epoch_is_counted_in_columns_and_nothing_is_left_out(n: int, world_size: int) -> None:
    found = shown(plain(n, batch_size=4, shuffle=True), world_size, epochs=1)
    got = np.array(found.got)
    widths = np.minimum(found.width, n - found.width * np.arange(got.shape[1]))
    assert len(got) == len(found.bands) == min(world_size, 32)
    assert (found.bands[0][0], found.bands[-1][1]) == (0, world_size - 1)
    assert got.shape[1] <= 121
    assert (got * widths).sum() == pytest.approx(n + -n % world_size, abs=0.01 * n)
    assert found.seen == (0, n - -n % world_size, -n % world_size)
    assert (np.array(found.often) * widths).sum(axis=1) == pytest.approx(found.seen, abs=0.01 * n)


def test_the_first_steps_show_how_ranks_wait() -> None:
    """Rank 0 works for 3, rank 1 for 5, and in the last steps each for 1."""
    costs = [3, 5] * 30 + [1, 1] * 20
    given = plain(100)
    (both,) = shown(given, 2, epochs=1, cost=costs, patch=False, allow=["not_sharded"]).waits
    assert both == "Ranks wait 0 % of the time"  # both get all
    waits = shown(given, 2, epochs=1, cost=costs).waits
    assert waits["Without cost=, ranks wait 18 % of the time"] == ((3.0,) * 8, (5.0,) * 8, (5.0,) * 8)
    assert list(waits)[1] == "With cost=, ranks wait 0 % of the time"
    assert shown(given, 2).waits == shown(given, 2, cost=[0] * 100).waits == {}


def test_the_first_epoch_that_fails_is_pictured() -> None:
    class Worse(Sampler[int]):
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(12 if self.passes < 3 else 10))

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return plain(12, sampler=setups.Nth(Worse() if world_size > 1 else range(12), rank, world_size))

    report = audited(make, 2, epochs=4)
    assert report.pictured.epoch == 2
    assert report.pictured.seen == (2, 10, 0)
    drawn = drawn_texts(report)
    assert {"How often ranks see each sample (epoch 2)", "2 never", "10 once", "0 again", "Which rank gets it"} <= {
        *drawn
    }
    assert audited(make, 2, epochs=2).pictured.epoch == 0


def test_waiting_is_shown_without_cost_and_with_it_and_said() -> None:
    report = audited(plain(40), 2, epochs=1, cost=[1, 3] * 20)
    titles = ["Without cost=, ranks wait 33 % of the time", "With cost=, ranks wait 0 % of the time"]
    assert {*titles, "time of 8 steps, in the unit of cost"} <= set(drawn_texts(report))
    told = alternative(report.pictured)
    assert told.startswith("Of 40 samples that one process draws, the ranks see 40 once, 0 more often and 0 never")
    assert all(title in told for title in titles)
    alone = audited(setups.uneven, 4, epochs=1, cost=np.ones(97))
    assert "Ranks wait 3.0 % of the time" in drawn_texts(alone)  # for rank 0, which makes a step more
    assert not any("wait" in text for text in drawn_texts(audited(plain(40), 2)))


def test_the_pictures_of_the_documentation_are_what_the_audit_shows() -> None:
    docs = Path(__file__).parents[2] / "docs"
    made = run_path(str(docs / "examples" / "loaders.py"))
    seen = audited(made["by_slices"], 4, epochs=1)
    waiting = audited(made["texts"], 4, epochs=1, cost=made["tokens"])
    for scheme in ("light", "dark"):
        drawn = {
            "audit-seen": svg(seen.pictured, scheme, ["shares"]),
            "audit": svg(waiting.pictured, scheme, ["waits"]),
        }
        for name, again in drawn.items():
            kept = (docs / f"{name}-{scheme}.svg").read_text()
            assert texts(kept) == texts(again), "run nox -s pictures"


def test_the_picture_of_the_front_page_says_under_which_condition() -> None:
    """matplotlib draws letters as shapes, and writes the text beside them."""
    docs = Path(__file__).parents[2] / "docs"
    light, dark = (
        re.findall("<!-- (.{4,}) -->", (docs / f"index-{scheme}.svg").read_text()) for scheme in ("light", "dark")
    )
    assert light == dark
    assert {"Four ranks, seeded differently, and a custom sampler.", "0 never, 0 repeated"} <= set(light)


def pictures_in(html: str) -> list[str]:
    return [b64decode(found).decode() for found in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html)]


def test_the_page_holds_all_that_it_shows() -> None:
    html = page({"train": audited(loader(), 4, cost=range(23))})
    assert "✔ 1 of 1 PASS" in html
    assert html.count("<picture") == html.count(' alt="Of 23 samples') == 1
    assert len(pictures_in(html)) == 2  # for a light ground and a dark one
    assert not re.findall(r'(?:src|srcset|href)="(?!data:)|url\(', html)
    order = ["<picture", "<dt>ranks</dt><dd>4", "<dt>python"]
    assert [*map(html.index, order)] == sorted(map(html.index, order))
    headings = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert all(after - before <= 1 for before, after in pairwise(headings))
    failed = page({"a": audited(loader(), 4, patch=False), "b": audited(loader(), 4)})
    assert "✘ 1 of 2 FAIL<" in failed
    assert failed.index("<picture") < failed.index("✘ not_sharded") < failed.index("<dt>ranks")


def test_a_notebook_shows_a_report() -> None:
    report = audited(loader(), 4)
    html = report._repr_html_()
    assert html.startswith("<div><style>")
    assert f"{report.name} on 4 ranks" in html
    assert "&lt;b&gt;" in audit({"a": loader(), "<b>": loader()}, 2)._repr_html_()


def test_without_matplotlib_a_page_says_how_to_get_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = audited(loader(), 4).html("train")
    assert "install matplotlib" in html
    assert "<dt>ranks</dt>" in html


def test_the_command_line_writes_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch.utils.data import DataLoader\nx = DataLoader(range(9))\n")
    result = CliRunner().invoke(commands, ["audit", "mine.py:x", "-w", "2", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    assert "<h2>x <span" in Path("page.html").read_text()
