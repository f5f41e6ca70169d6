"""The picture and the page: what they are drawn from, and that they say it."""

import re
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
from zoo import BY_NAME, loader

from ddp_patch import audit
from ddp_patch.auditing import Pictured, Report
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.picture import alternative, svg
from ddp_patch.auditing.report import page

HERE = "ddp-patch audit <x>"


def audited(given: Any, world_size: int, **options: Any) -> Report:
    report: Report = audit(given, world_size, **options)
    return report


def shown(given: Any, world_size: int, **options: Any) -> Pictured:
    return audited(given, world_size, **options).pictured


def texts(drawn: str) -> list[str]:
    return [each.text for each in ElementTree.fromstring(drawn).iter() if each.text and each.text.strip()]  # noqa: S314 - ours


def drawn_texts(report: Report) -> list[str]:
    return texts(svg(report.pictured, None if report.balanced is None else report.balanced.pictured, "light"))


def plain(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), **options)


def test_the_picture_is_of_the_stream_of_one_process() -> None:
    """Five samples over two ranks: the first one again fills the last round."""
    found = shown(plain(5), 2)
    assert [*found.got] == [(1, 0, 1, 0, 1), (1, 1, 0, 1, 0)]
    assert found.seen == (0, 4, 1)
    assert [*found.levels] == [(0, 0, 1), *[(0, 1, 0)] * 4]


def test_a_sample_that_one_process_draws_twice_is_got_at_both_places_in_part() -> None:
    """One process draws 7, 8, 7, 9; rank 0 gets 7 and 7, and rank 1 gets 8, 7 and a 5 of nowhere."""

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        order = [7, 8, 7, 9] if world_size == 1 else [[7, 7], [8, 7, 5]][rank]
        return plain(10, sampler=order)

    found = shown(make, 2)
    assert [*found.got] == [(1, 0, 1, 0), (0.5, 1, 0.5, 0)]
    assert found.seen == (1, 2, 1)
    assert [*found.levels] == [(0, 0.5, 0.5), (0, 1, 0), (0, 0.5, 0.5), (1, 0, 0)]


def test_of_a_shuffled_epoch_positions_are_interleaved() -> None:
    found = shown(plain(12, shuffle=True), 3)
    assert found.got == tuple((0,) * rank + (1, 0, 0) * 3 + (1,) + (0,) * (2 - rank) for rank in range(3))


@pytest.mark.parametrize(("n", "world_size"), [(121, 2), (1000, 3), (10007, 8), (3000, 300), (2000, 12)])
def test_a_long_epoch_is_counted_in_columns_and_nothing_is_left_out(n: int, world_size: int) -> None:
    found = shown(plain(n, batch_size=4, shuffle=True), world_size, epochs=1)
    got, levels = np.array(found.got), np.array(found.levels)
    widths = np.minimum(found.width, n - found.width * np.arange(len(levels)))
    assert len(got) == len(found.bands) == min(world_size, 32)
    assert (found.bands[0][0], found.bands[-1][1]) == (0, world_size - 1)
    assert len(levels) <= 121
    assert (got * widths).sum() == pytest.approx(n + -n % world_size, abs=0.01 * n)
    assert levels.sum(axis=1) == pytest.approx(1, abs=1e-3)
    assert found.seen == (0, n - -n % world_size, -n % world_size)


def test_a_right_loader_is_shown_even() -> None:
    """Columns are whole rounds: rounding makes no stripes."""
    got = np.array(shown(plain(10_000, shuffle=True), 8, epochs=1).got)
    assert set(got[:, :-1].ravel()) == {1 / 8}


def thirty_percent_lost(rank: int, world_size: int) -> DataLoader[Any]:
    kept = [index for index in range(2000) if world_size == 1 or index * 7919 % 10 >= 3]
    return plain(2000, sampler=kept[rank::world_size])


def test_what_is_shown_is_the_fraction() -> None:
    """Three of ten samples are missing, spread over the epoch: three tenths of the strip say so."""
    report = audited(thirty_percent_lost, 4, epochs=1)
    assert np.array(report.pictured.levels).mean(axis=0) == pytest.approx([0.3, 0.7, 0], abs=1e-3)
    assert {"never: 600", "once: 1400"} <= set(drawn_texts(report))
    unpatched = audited(plain(2000), 4, epochs=1, patch=False)
    assert set(np.array(unpatched.pictured.got).ravel()) == {1}  # each rank gets each sample
    assert "again: 2000" in drawn_texts(unpatched)


def test_of_a_part_of_an_epoch_nothing_is_shown_as_missing() -> None:
    found = shown(plain(5000), 2, max_items=100, epochs=1)
    assert found.seen[0] == 0
    assert not np.array(found.levels)[:, 0].any()


def test_the_steps_that_are_most_like_the_epoch_show_how_ranks_wait() -> None:
    """Rank 0 works for 3, rank 1 for 5; but in the first and last steps of the epoch both differ."""
    costs = [9, 9] * 10 + [3, 5] * 30 + [1, 1] * 10
    given = plain(100)
    waits = audit(given, 2, epochs=1, cost=costs, patch=False, allow=["not_sharded"]).pictured.waits
    assert waits is not None
    assert waits.imbalance == 1  # both ranks get all

    waits = audit(given, 2, epochs=1, cost=costs).pictured.waits
    assert waits is not None
    assert 10 <= waits.first <= 40 - 8
    assert waits.ranks == (0, 1)
    assert waits.costs == ((3.0,) * 8, (5.0,) * 8)
    assert waits.slowest == (5.0,) * 8
    assert waits.imbalance == (90 + 150 + 10) / (90 + 120 + 10)
    assert audit(given, 2).pictured.waits is None
    assert audit(given, 2, cost=[0] * 100).pictured.waits is None


def test_of_many_ranks_some_are_shown_and_all_are_waited_for() -> None:
    costs = np.ones(64 * 4)
    costs[5::64] = 7
    waits = audit(plain(64 * 4), 64, epochs=1, cost=costs).pictured.waits
    assert waits is not None
    assert len(waits.ranks) == len(set(waits.ranks)) == len(waits.costs) == 10
    assert 5 not in waits.ranks
    assert waits.slowest == (7.0,) * 4


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
    assert report.pictured.levels[10:] == ((1, 0, 0), (1, 0, 0))
    assert "How often the ranks see each sample (epoch 2)" in drawn_texts(report)
    assert audited(make, 2, epochs=2).pictured.epoch == 0


def test_ranks_samples_and_counts_are_written() -> None:
    drawn = drawn_texts(audited(loader(), 4))
    assert {"rank 0", "rank 3", "once: 22", "again: 1"} <= set(drawn)
    many = drawn_texts(audited(plain(2000), 96))
    assert {"ranks 0 to 2", "ranks 93 to 95"} <= set(many)


def test_waiting_is_shown_without_cost_and_with_it() -> None:
    report = audited(plain(40), 2, epochs=1, cost=[1, 3] * 20)
    drawn = set(drawn_texts(report))
    assert {"Without cost=, ranks wait 33 % of the time", "With cost=, ranks wait 0 % of the time"} <= drawn
    assert "time of 8 steps, in the unit of cost" in drawn
    alone = audited(setups.uneven, 4, epochs=1, cost=np.ones(97))
    assert "Ranks wait 3.0 % of the time" in drawn_texts(alone)  # for rank 0, which makes a step more
    assert not any("wait" in text for text in drawn_texts(audited(plain(40), 2)))


def test_what_is_shown_is_said_too() -> None:
    report = audited(plain(5), 2, epochs=1, cost=[1] * 5)
    assert report.balanced is not None
    told = alternative(report.pictured, report.balanced.pictured)
    assert told.startswith("Of 5 samples that one process draws, the ranks see 4 once, 1 more often and 0 never")
    assert "With cost=, ranks wait" in told


def test_the_pictures_of_the_documentation_are_what_the_audit_shows() -> None:
    docs = Path(__file__).parents[2] / "docs"
    made = run_path(str(docs / "examples" / "loaders.py"))
    seen = audited(made["by_slices"], 4, epochs=1)
    waiting = audited(made["texts"], 4, epochs=1, cost=made["tokens"])
    assert waiting.balanced is not None
    for scheme in ("light", "dark"):
        drawn = {
            "audit-seen": svg(seen.pictured, None, scheme, ["shares"]),
            "audit": svg(waiting.pictured, waiting.balanced.pictured, scheme, ["waits"]),
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
    html = page({"train": audited(loader(), 4, cost=range(23))}, HERE)
    assert "✔ 1 of 1 PASS" in html
    assert html.count("<picture") == html.count(' alt="Of 23 samples') == 1
    assert len(pictures_in(html)) == 2  # for a light ground and a dark one
    assert not re.findall(r'(?:src|srcset|href)="(?!data:)|url\(', html)
    order = ["<picture", "<dt>ranks</dt><dd>4", "<dt>command"]
    assert [*map(html.index, order)] == sorted(map(html.index, order))
    headings = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert all(after - before <= 1 for before, after in pairwise(headings))
    failed = page({"a": audited(loader(), 4, patch=False), "b": audited(loader(), 4)}, HERE)
    assert "✘ 1 of 2 FAIL<" in failed
    assert failed.index("<picture") < failed.index("✘ not_sharded") < failed.index("<dt>ranks")


def test_the_page_says_when_how_and_with_what_it_was_made() -> None:
    html = page({"train": audited(setups.uneven, 4)}, HERE)
    assert "<dd>ddp-patch audit &lt;x&gt;</dd>" in html
    assert re.search(r"<dd>\d{4}-\d\d-\d\d \d\d:\d\d UTC</dd>", html)
    assert re.search(r"<dd>python [\d.]+, ddp-patch [^,]+, torch [^,]+, numpy [^,]+</dd>", html)
    code = f"{Path(str(setups.__file__))}:{setups.uneven.__code__.co_firstlineno}"
    assert code.endswith(f"/{dict(audited(setups.uneven, 4).facts())['code']}".split("/tests/")[-1])


def test_a_notebook_shows_a_report() -> None:
    report = audited(loader(), 4)
    html = report._repr_html_()
    assert html.startswith("<div><style>")
    assert "NONE on 4 ranks".replace("NONE", report.name) in html
    several = audit({"a": loader(), "<b>": loader()}, 2)._repr_html_()
    assert several.count("<style>") == 1
    assert several.count("<section") == 2
    assert "&lt;b&gt;" in several


def test_without_matplotlib_a_page_says_how_to_get_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ddp_patch.auditing.picture", None)
    html = audited(loader(), 4).html("train")
    assert "install matplotlib" in html
    assert "<dt>ranks</dt>" in html


@pytest.mark.parametrize("name", ["no item", "one item", "string keys", "iterable, empty", "P x K batches", "iterable"])
def test_any_loader_can_be_pictured(name: str) -> None:
    report = audited(BY_NAME[name].make(), 3)
    html = page({"<b>&$x$": report}, HERE)
    assert "&lt;b&gt;&amp;$x$" in html
    assert ("<picture" in html) == any(report.epochs[0].items)


def test_facts_and_json_say_what_was_counted() -> None:
    report, again = (audited(loader(), 4, patch=False) for _ in range(2))
    facts = dict(report.facts())
    assert facts["ranks"] == "4"
    assert facts["counted in"] == "samples"  # whether or not the ranks shard them
    differs = {name for name, value in report.to_dict().items() if value != again.to_dict()[name]}
    assert differs <= {"code"}


def test_the_command_line_writes_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch.utils.data import DataLoader\nx = DataLoader(range(9))\n")
    monkeypatch.setattr("sys.argv", ["ddp-patch", "audit", "it's"])
    result = CliRunner().invoke(commands, ["audit", "mine.py:x", "-w", "2", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    html = Path("page.html").read_text()
    assert "<dt>code</dt><dd>mine.py:2</dd>" in html
    assert "ddp-patch audit &#x27;it&#x27;" in html
