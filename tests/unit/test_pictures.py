"""The pictures and their page: what they are drawn of, and that they can be read without colour."""

import base64
import re
import xml.etree.ElementTree as ElementTree
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
from ddp_patch.auditing.show.frame import Picture
from ddp_patch.auditing.show.page import page
from ddp_patch.auditing.show.pictures import pictures_of
from torch.utils.data import DataLoader, Sampler
from zoo import BY_NAME, loader

from ddp_patch import audit
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.pictured import ShareMap

SVG = "{http://www.w3.org/2000/svg}"


def pictures(loader: Any, world_size: int, **options: Any) -> list[Picture]:
    return pictures_of(audit(loader, world_size, **options))


def texts(picture: Picture) -> list[str]:
    both = [[e.text or "" for e in ElementTree.fromstring(svg).iter(f"{SVG}text")] for svg in picture_svgs(picture)]  # noqa: S314 - ours
    assert both[0] == both[1]
    return both[0]


def picture_svgs(picture: Picture) -> tuple[str, str]:
    return picture.light, picture.dark


def plain(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), **options)


def shares(loader: Any, world_size: int, **options: Any) -> ShareMap:
    return audit(loader, world_size, **options).pictured.shares


def test_the_share_map_is_of_the_stream_of_one_process() -> None:
    """Five samples over two ranks: the first one again fills the last round."""
    found = shares(plain(5), 2)
    assert found.names == ("0", "1", "2", "3", "4")
    assert found.got == ((1, 0, 1, 0, 1), (1, 1, 0, 1, 0))
    assert found.again == ((0, 0, 0, 0, 0), (1, 0, 0, 0, 0))
    assert found.reason == "padding"
    assert not any(found.missing)


def test_the_kth_time_that_a_sample_is_got_is_its_kth_position() -> None:
    """One process draws 7, 8, 7, 9; rank 0 gets 7 and 7, and rank 1 gets 8, 7 and a 5 of nowhere."""

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        order = [7, 8, 7, 9] if world_size == 1 else [[7, 7], [8, 7, 5]][rank]
        return plain(10, sampler=order)

    found = shares(make, 2)
    assert found.got == ((1, 0, 1, 0), (1, 1, 0, 0))
    assert found.again == ((0, 0, 0, 0), (1, 0, 0, 0))  # the third 7 is the first one again
    assert found.missing == (0, 0, 0, 1)
    assert found.foreign == (0, 1)
    assert found.reason == "repeated"


def test_of_a_shuffled_epoch_positions_are_interleaved() -> None:
    found = shares(plain(12, shuffle=True), 3)
    assert found.got == tuple((0,) * rank + (1, 0, 0) * 3 + (1,) + (0,) * (2 - rank) for rank in range(3))


@pytest.mark.parametrize(("n", "world_size"), [(41, 2), (1000, 3), (10007, 8), (3000, 300)])
def test_a_long_epoch_is_counted_in_columns_and_nothing_is_left_out(n: int, world_size: int) -> None:
    found = shares(plain(n, batch_size=4, shuffle=True), world_size, epochs=1)
    got, again = np.array(found.got), np.array(found.again)
    assert found.names == ()
    assert got.shape == again.shape == (world_size, len(found.missing))
    assert got.shape[1] <= 240
    assert got.size <= 12_000
    assert (got - again).sum() == found.positions == n
    assert again.sum() == -n % world_size
    assert (got - again).sum(axis=0).max() - (got - again).sum(axis=0).min() <= 1


def test_what_is_missing_lies_where_one_process_would_draw_it() -> None:
    found = shares(setups.loader(range(1000), n=1000), 3, uneven="drop", allow=["tail_lost"], epochs=1)
    assert found.missing == (*[0] * 239, 1)


def test_blocks_of_steps_are_looked_up_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return plain(50, sampler=[n % 5 for n in range(rank % 2, 90, world_size)])

    whole = audit(make, 3).pictured
    monkeypatch.setattr("ddp_patch.auditing.show.binning._BLOCK", 7)
    assert audit(make, 3).pictured == whole


def test_steps_are_counted_in_columns() -> None:
    steps = audit(plain(5000, batch_size=2), 2, epochs=1).pictured.steps
    assert steps.steps == 1250
    assert {len(row) for row in steps.sizes} == {240}
    assert set(np.array(steps.sizes).ravel()) == {2.0}


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


def test_the_first_epoch_that_does_not_hold_is_pictured() -> None:
    class Worse(Sampler[int]):
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(12 if self.passes < 3 else 10))

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return plain(12, sampler=setups.Nth(Worse() if world_size > 1 else range(12), rank, world_size))

    report = audit(make, 2, epochs=4)
    assert report.pictured.epoch == 2
    assert report.pictured.shares.missing[10:] == (1, 1)
    assert pictures_of(report)[0].title == "Who gets what in epoch 2"
    assert audit(make, 2, epochs=2).pictured.epoch == 0


def test_names_and_marks_are_text_and_hatches() -> None:
    padded = pictures(loader(), 4)[0]
    assert {"0", "22", "rank 3", "got", "padding"} <= set(texts(padded))
    assert "padding" not in texts(pictures(plain(8), 4)[0])
    repeated = pictures(setups.not_sharded_in_order, 2)[0]
    assert {"got", "repeated"} <= set(texts(repeated))
    assert "103 are got again (repeated)" in repeated.alt
    missing = pictures(loader(), 2, uneven="drop")[0]
    assert {"missing", "no rank"} <= set(texts(missing))
    for picture in (padded, repeated, missing):
        assert all("<pattern" in svg for svg in picture_svgs(picture))
    assert "<pattern" not in pictures(plain(8), 4)[0].light


def test_steps_that_a_rank_does_not_make_are_hatched() -> None:
    steps = pictures(setups.uneven, 4)[1]
    assert "no such step" in texts(steps)
    assert pictures(plain(7), 64, uneven="keep")[1].alt.startswith("Each of 64 ranks makes 0 to 1 steps; ")
    assert "Rank 0 makes 7 steps; Rank 1 makes 6 steps" in steps.alt
    assert texts(steps).count("4") == 4 * 6 + 1  # every batch's size, and the tick of step 4


def test_waiting_is_drawn_without_cost_and_with_it() -> None:
    """Bars of both panels stand on one axis, and what they say is text."""
    costs = [1, 3] * 20
    assert len(pictures(plain(40), 2)) == 2
    *_, both = pictures(plain(40), 2, epochs=1, cost=costs)
    headings = [
        "Without cost=, ranks wait 33 % of the time (epoch 0)",
        "With cost=, ranks wait 0 % of the time (epoch 0)",
    ]
    assert {*headings, "works", "waits for the slowest rank", "rank 1", "time, in the unit of cost"} <= set(texts(both))
    assert both.alt == "; ".join(headings) + "."
    assert all("<pattern" in svg for svg in picture_svgs(both))
    assert "The 8 steps" in both.caption
    *_, one = pictures(setups.uneven, 4, epochs=1, cost=np.ones(97))
    assert "Ranks wait 3.0 % of the time (epoch 0)" in texts(one)  # for rank 0, which makes a step more


def test_a_bar_is_as_long_as_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    hatched: list[tuple[float, float]] = []

    def note(axes: Any, ranges: Any, place: Any, **how: Any) -> None:
        (hatched if how.get("hatch") else drawn).extend((float(x), float(width)) for x, width in ranges)

    monkeypatch.setattr("matplotlib.axes.Axes.broken_barh", note)
    pictures(plain(6), 2, epochs=1, cost=[1, 3, 4, 2, 5, 5], share="samples")
    light = len(drawn) // 2
    # Rank 0, then rank 1; steps begin at 0, 3 and 7.
    assert drawn[:6] == [(0, 1), (3, 4), (7, 5), (0, 3), (3, 2), (7, 5)]
    assert hatched[:6] == [(1, 2), (7, 0), (12, 0), (3, 0), (5, 2), (12, 0)]
    assert drawn[light:] == drawn[:light]


def test_the_picture_of_the_documentation_is_what_the_audit_draws() -> None:
    docs = Path(__file__).parents[2] / "docs"
    made = run_path(str(docs / "examples" / "loaders.py"))
    *_, picture = pictures(made["texts"], 4, epochs=1, cost=made["tokens"])
    for name in ("audit-light.svg", "audit-dark.svg"):
        shown = [each.text for each in ElementTree.parse(docs / name).iter(f"{SVG}text")]  # noqa: S314 - ours
        assert shown == texts(picture), "run nox -s pictures"


def test_light_and_dark_differ_in_colours_alone() -> None:
    for picture in pictures(loader(), 4, cost=range(23)):
        coloured = r"#[0-9a-f]{6}|base64,[^\"]+|(?:image|h|m|p)[0-9a-f]{10,}"  # hashes of names are of colours, too
        light, dark = (re.sub(coloured, "", svg) for svg in picture_svgs(picture))
        assert light == dark
        assert picture.light != picture.dark


def test_the_page_holds_all_that_it_shows() -> None:
    html = page({"train": audit(loader(), 4, cost=range(23))})
    assert "✔ all 1 hold" in html
    assert html.count("<picture>") == html.count('media="(prefers-color-scheme: dark)"') == 3
    sources = re.findall(r'(?:src|srcset|href)="([^"]{0,26})', html)
    assert sources == ["data:image/svg+xml;base64,"] * 6
    for encoded in re.findall(r'base64,([^"]+)"', html):
        svg = base64.b64decode(encoded).decode()
        assert not re.findall(r'(?:href|src)="(?!#|data:)', svg)
    assert html.count('alt="') == 3
    headings = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert all(after - before <= 1 for before, after in pairwise(headings))


@pytest.mark.parametrize("name", ["no item", "one item", "string keys", "iterable, empty", "P x K batches", "iterable"])
def test_any_loader_can_be_pictured(name: str) -> None:
    report = audit(BY_NAME[name].make(), 3)
    html = page({"<b>&$x$": report})
    assert "&lt;b&gt;&amp;$x$" in html
    assert ("<picture>" in html) == any(report.epochs[0].items)
    assert all(picture.alt and texts(picture) for picture in pictures_of(report))


def test_names_are_no_markup() -> None:
    """Neither matplotlib's mathematics nor SVG's."""
    keys = ["$x$", "<a>", "a&b", "a long name"]
    names = texts(pictures(DataLoader(dict.fromkeys(keys, 0), sampler=keys), 2)[0])  # type: ignore[arg-type]  # keys
    assert {"'$x$'", "'<a>'", "'a&b'", "'a l…"} <= set(names)


def test_the_command_line_writes_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch.utils.data import DataLoader\nx = DataLoader(range(9))\n")
    result = CliRunner().invoke(commands, ["audit", "mine.py:x", "-w", "2", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    assert "<picture>" in Path("page.html").read_text()
