"""The figures and their page: what they are drawn from, and that they can be read without colour."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

import audit_setups as setups
import numpy as np
import pytest
from audit_setups import Untouchable
from click.testing import CliRunner
from quick import soaked
from torch.utils.data import DataLoader, Sampler
from zoo import BY_NAME, loader

from ddp_patch import audit
from ddp_patch.auditing import Report
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.show_figures import figures_of
from ddp_patch.auditing.show_maps import ShareMap
from ddp_patch.auditing.show_report import Provenance, page
from ddp_patch.auditing.show_svg import PATTERNS, STYLE, Figure, figure_html, figures_svg

HERE = Provenance("ddp-patch audit <x>", date="some day", versions={"torch": "9"})


def audited(given: Any, world_size: int, **options: Any) -> Report:
    report: Report = audit(given, world_size, **options)
    return report


def figures(given: Any, world_size: int, **options: Any) -> list[Figure]:
    return shown_of(audited(given, world_size, **options))


def shown_of(report: Report) -> list[Figure]:
    balanced = None if report.balanced is None else report.balanced.pictured
    return figures_of(report.pictured, balanced, report.world_size)


def texts(figure: Figure) -> list[str]:
    """All texts that are seen."""
    elements = ElementTree.fromstring(f"<p>{figure_html(figure)}</p>").iter()  # noqa: S314 - ours
    return [each.text for each in elements if each.text]


def plain(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), **options)


def shares(given: Any, world_size: int, **options: Any) -> ShareMap:
    return audited(given, world_size, **options).pictured.shares


def full(figure: Figure, row: int = 0) -> dict[str, float]:
    """The area of a row that each fill covers."""
    found: dict[str, float] = {}
    for bar in figure.rows[row].bars:
        found[bar.fill] = found.get(bar.fill, 0) + bar.width * bar.height
    return found


def test_the_share_map_is_of_the_stream_of_one_process() -> None:
    """Five samples over two ranks: the first one again fills the last round."""
    found = shares(plain(5), 2)
    assert found.names == ("0", "1", "2", "3", "4")
    assert found.got == ((1, 0, 1, 0, 1), (1, 1, 0, 1, 0))
    assert found.again == ((1, 0, 0, 0, 0), (1, 0, 0, 0, 0))  # no rank is the one too many
    assert found.reason == "padding"
    assert found.times == (2, 1, 1, 1, 1)
    assert found.seen == ((1, 4), (2, 1))
    assert found.levels == ((0, 0, 1), *[(0, 1, 0)] * 4)


def test_the_kth_time_that_a_sample_is_got_is_its_kth_position() -> None:
    """One process draws 7, 8, 7, 9; rank 0 gets 7 and 7, and rank 1 gets 8, 7 and a 5 of nowhere."""

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        order = [7, 8, 7, 9] if world_size == 1 else [[7, 7], [8, 7, 5]][rank]
        return plain(10, sampler=order)

    found = shares(make, 2)
    assert found.got == ((1, 0, 1, 0), (1, 1, 0, 0))
    assert found.again == ((1, 0, 0, 0), (1, 0, 0, 0))  # the third 7 is the first one again
    assert found.times == (2, 1, 1, 0)
    assert found.seen == ((0, 1), (1, 2), (2, 1))
    assert found.foreign == (0, 1)
    assert found.reason == "repeated"


def test_of_a_shuffled_epoch_positions_are_interleaved() -> None:
    found = shares(plain(12, shuffle=True), 3)
    assert found.got == tuple((0,) * rank + (1, 0, 0) * 3 + (1,) + (0,) * (2 - rank) for rank in range(3))


@pytest.mark.parametrize(("n", "world_size"), [(41, 2), (1000, 3), (10007, 8), (3000, 300)])
def test_a_long_epoch_is_counted_in_columns_and_nothing_is_left_out(n: int, world_size: int) -> None:
    found = shares(plain(n, batch_size=4, shuffle=True), world_size, epochs=1)
    got, again, levels = np.array(found.got), np.array(found.again), np.array(found.levels)
    assert (found.names, found.times) == ((), ())
    assert got.shape == again.shape == (world_size, len(levels)) == (world_size, -(-n // found.width))
    assert got.shape[1] <= 120
    assert got.size <= 12_000
    assert got.sum() == n + -n % world_size
    assert found.positions == levels.sum() == n
    assert again.sum() == 2 * (-n % world_size)  # at the rank that has it anyway, and at the one that needs it
    assert dict(found.seen).get(2, 0) == -n % world_size
    assert (levels.sum(axis=1)[:-1] == found.width).all()


@pytest.mark.parametrize(("n", "world_size"), [(1000, 8), (10007, 8), (5000, 3), (3000, 300), (2000, 12)])
def test_a_right_loader_is_shown_even(n: int, world_size: int) -> None:
    """Each rank's row is full, but for the last column: rounding makes no stripes."""
    report = audited(plain(n, shuffle=True), world_size, epochs=1)
    who, map_ = shown_of(report)[1], report.pictured.shares
    columns, whole = n / map_.width, n // map_.width
    for rank in range(world_size):
        middles = [(at + 0.5) / columns for at in range(whole)]
        assert all(
            max(bar.bottom + bar.height for bar in who.rows[rank].bars if bar.left <= x < bar.left + bar.width)
            == pytest.approx(1)
            for x in middles
        )
    assert "A full column means that the rank gets its fair share of it." in who.caption


@pytest.mark.parametrize("uneven", ["pad", "keep"])
def test_the_last_column_is_as_full_as_it_is(uneven: str) -> None:
    """Its 20 positions are 2.5 for each of 8 ranks: four get 3, four get 2."""
    report = audited(plain(24 * 83 + 20, shuffle=True), 8, epochs=1, uneven=uneven, allow=["uneven_steps"])
    assert report.pictured.shares.width == 24
    who = shown_of(report)[1]
    last = [max(bar.height for bar in row.bars if bar.left + bar.width > 1 - 1e-6) for row in who.rows]
    assert last == pytest.approx([1] * 4 + [0.8] * 4)


def test_bars_leave_no_line_between_them() -> None:
    for n, world_size in ((10007, 7), (5003, 3), (103, 4)):
        for figure in figures(plain(n, batch_size=3, shuffle=True), world_size, epochs=1):
            html = figure_html(figure)
            pairs = re.findall(r'<rect x="([^%]+)%" y="[^"]+" width="([^%]+)%"', html)
            begins = [float(left) for left, _ in pairs]
            for left, width in pairs:
                end = float(left) + float(width)
                assert not [begin for begin in begins if 5e-6 < abs(begin - end) < 1e-2]


def test_whole_batches_are_shown_even_too() -> None:
    given: DataLoader[Any] = plain(30_000, batch_size=32, shuffle=True)
    _, who, *_ = figures(given, 8, epochs=1, share="batches")
    for row in who.rows:
        assert all(bar.bottom + bar.height == pytest.approx(1) for bar in row.bars if bar.left + bar.width < 1)


def thirty_percent_lost(rank: int, world_size: int) -> DataLoader[Any]:
    kept = [index for index in range(2000) if world_size == 1 or index * 7919 % 10 >= 3]
    return plain(2000, sampler=kept[rank::world_size])


def test_what_is_shown_is_the_fraction() -> None:
    """Three of ten samples are missing, spread over the epoch: three tenths of the strip say so."""
    strip, who, *_ = figures(thirty_percent_lost, 4, epochs=1)
    assert full(strip) == pytest.approx({"never": 0.3, "once": 0.7}, abs=1e-6)
    assert [text for _, text in strip.legend] == ["never: 600 (30 %)", "once: 1400 (70 %)"]
    assert sum(full(who, rank)["once"] for rank in range(4)) == pytest.approx(4 * 0.7, rel=0.2)
    strip, who, *_ = figures(plain(2000), 4, epochs=1, patch=False, allow=["not_sharded"])
    assert [text for _, text in strip.legend] == ["4 times: 2000 (100 %)"]
    assert full(strip) == {"again": 1}
    assert [full(who, rank) for rank in range(4)] == [{"again": 1}] * 4
    assert "gets as many samples as the column has" in who.caption
    assert [fill for fill, _ in who.legend] == ["again"]


def test_how_often_samples_are_seen_comes_first_with_counts() -> None:
    strip = figures(setups.ambient_order, 4, epochs=1)[0]
    seen = dict(shares(setups.ambient_order, 4, epochs=1).seen)
    assert strip.title == "How often samples are seen in epoch 0"
    told = "; ".join(text for _, text in strip.legend)
    assert f"never: {seen[0]} (" in told
    assert f"2 times: {seen[2]} (" in told
    assert f"{told}." == strip.alt
    assert sum(seen.values()) == setups.N
    padded = figures(plain(1003), 4)[0]
    assert [text for _, text in padded.legend] == ["once: 1002 (> 99 %)", "2 times: 1 (< 1 %), to fill the last round"]


def test_many_different_counts_are_summed_up() -> None:
    def make(rank: int, world_size: int) -> DataLoader[Any]:
        order = [*range(20)] if world_size == 1 else [index for index in range(20) for _ in range(index % 10)]
        return plain(20, sampler=order)

    strip = figures(make, 2, epochs=1)[0]
    assert [text for _, text in strip.legend][-1] == "10 to 18 times: 10 (50 %)"
    assert [bar.text for bar in strip.rows[0].bars][-1] == "18"


def test_of_a_part_of_an_epoch_nothing_is_shown_as_missing() -> None:
    found = shares(plain(5000), 2, max_items=100, epochs=1)
    assert all(times > 0 for times, _ in found.seen)
    assert not np.array(found.levels)[:, 0].any()


def test_what_is_missing_lies_where_one_process_would_draw_it() -> None:
    found = shares(setups.loader(range(1000), n=1000), 3, uneven="drop", allow=["tail_lost"], epochs=1)
    assert [level[0] for level in found.levels] == [*[0] * (len(found.levels) - 1), 1]


def test_blocks_of_steps_are_looked_up_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return plain(50, sampler=[n % 5 for n in range(rank % 2, 90, world_size)])

    whole = audit(make, 3).pictured
    monkeypatch.setattr("ddp_patch.auditing.show_maps._BLOCK", 7)
    assert audit(make, 3).pictured == whole


def test_steps_are_counted_in_columns() -> None:
    steps = audit(plain(5000, batch_size=2), 2, epochs=1).pictured.steps
    assert steps.steps == 1250
    assert ({len(row) for row in steps.sizes}, steps.width) == ({114}, 11)
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


def test_the_first_epoch_that_fails_is_pictured() -> None:
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
    assert report.pictured.shares.times[10:] == (0, 0)
    assert shown_of(report)[1].title == "Who gets what in epoch 2"
    assert audit(make, 2, epochs=2).pictured.epoch == 0


def test_names_and_marks_are_text_and_patterns() -> None:
    strip, padded, *_ = figures(loader(), 4)
    alone, ground = "got by this rank alone", "not got by this rank"
    assert {"0", "22", "rank 3", alone, "also got by another rank, to fill the last round", ground} <= set(
        texts(padded)
    )
    assert {bar.text for bar in strip.rows[0].bars} == {"1", "2"}
    assert [text for _, text in figures(plain(8), 4)[1].legend] == [alone, ground]
    repeated = figures(setups.not_sharded_in_order, 2)[1]
    assert [text for _, text in repeated.legend] == ["also got by another rank, or twice by this one"]
    assert "103 of them another rank, or this one, had already (repeated)" in repeated.alt
    assert all(f'id="ddp-{fill}"' in PATTERNS for fill in ("again", "never", "wait"))
    patterns = {
        fill: re.findall(f'id="ddp-{fill}".*?(<path d="[^"]+")', PATTERNS) for fill in ("again", "never", "wait")
    }
    assert all(patterns.values())
    assert patterns["again"] != patterns["never"]


def test_steps_that_a_rank_does_not_make_are_marked() -> None:
    steps = figures(setups.uneven, 4)[2]
    assert "no step" in texts(steps)
    assert figures(plain(7), 64, uneven="keep")[2].alt.startswith("Each of 64 ranks makes 0 to 1 steps; ")
    assert "Rank 0 makes 7 steps; Rank 1 makes 6 steps" in steps.alt
    assert [bar.text for bar in steps.rows[0].bars] == ["4"] * 6 + ["1"]
    assert [round(7 * bar.left, 6) for bar in steps.rows[1].bars if bar.fill == "never"] == [6]


def test_waiting_is_shown_without_cost_and_with_it() -> None:
    costs = [1, 3] * 20
    assert len(figures(plain(40), 2)) == 3
    *_, without, with_it = figures(plain(40), 2, epochs=1, cost=costs)
    assert without.title == "Without cost=, ranks wait 33 % of the time (epoch 0)"
    assert with_it.title == "With cost=, ranks wait 0 % of the time (epoch 0)"
    assert {"works", "waits for the slowest rank", "rank 1"} <= set(texts(without))
    assert "The 8 steps" in without.caption
    ends = dict(text_and_place[::-1] for text_and_place in (without.ticks[-1], with_it.ticks[-1]))
    assert ends == {"24": 1, "16": 16 / 24}  # on the same scale
    *_, one = figures(setups.uneven, 4, epochs=1, cost=np.ones(97))
    assert one.title == "Ranks wait 3.0 % of the time (epoch 0)"  # for rank 0, which makes a step more


def test_a_bar_is_as_long_as_it_costs() -> None:
    without = figures(plain(6), 2, epochs=1, cost=[1, 3, 4, 2, 5, 5], share="samples")[3]
    # Steps begin at 0, 3 and 7 of 12.
    drawn = [
        [(bar.fill, round(12 * bar.left, 6), round(12 * bar.width, 6)) for bar in row.bars if bar.fill != "line"]
        for row in without.rows
    ]
    assert drawn == [
        [("once", 0, 1), ("wait", 1, 2), ("once", 3, 4), ("once", 7, 5)],
        [("once", 0, 3), ("once", 3, 2), ("wait", 5, 2), ("once", 7, 5)],
    ]


def test_the_picture_of_the_documentation_is_what_the_audit_shows() -> None:
    docs = Path(__file__).parents[2] / "docs"
    made = run_path(str(docs / "examples" / "loaders.py"))
    seen = figures(made["by_slices"], 4, epochs=1)[:2]
    waiting = figures(made["texts"], 4, epochs=1, cost=made["tokens"])[-2:]
    for name, found in {"audit-seen": seen, "audit": waiting}.items():
        drawn = figures_svg(found, "#000")
        for scheme in ("light", "dark"):
            shown = (docs / f"{name}-{scheme}.svg").read_text()
            assert re.findall("<text.*?>(.*?)<", shown) == re.findall("<text.*?>(.*?)<", drawn), "run nox -s pictures"
            assert shown.count("<rect") == drawn.count("<rect"), "run nox -s pictures"


def test_the_picture_of_the_front_page_says_under_which_condition() -> None:
    """matplotlib draws letters as shapes, and writes the text beside them."""
    docs = Path(__file__).parents[2] / "docs"
    light, dark = (
        re.findall("<!-- (.{4,}) -->", (docs / f"index-{scheme}.svg").read_text()) for scheme in ("light", "dark")
    )
    assert light == dark
    assert {"Four ranks, seeded differently, and a custom sampler.", "0 never, 0 repeated"} <= set(light)


def test_the_page_holds_all_that_it_shows() -> None:
    html = page({"train": audited(loader(), 4, cost=range(23))}, HERE)
    assert "✔ 1 of 1 PASS" in html
    assert html.count('class="ddp-figure') == html.count('role="img"') == html.count("aria-label=") == 5
    assert not re.findall(r'(?:src|srcset|href|url)[=(]"?(?!#)', html.replace("url(#", ""))
    order = ["How often samples are seen", "Who gets what", "<dt>ranks</dt><dd>4", "Batch sizes", "<dt>command"]
    assert [*map(html.index, order)] == sorted(map(html.index, order))
    headings = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert all(after - before <= 1 for before, after in pairwise(headings))
    failed = page({"a": audited(loader(), 4, patch=False), "b": audited(loader(), 4)}, HERE)
    assert "✘ 1 of 2 FAIL<" in failed
    assert failed.index("Who gets what") < failed.index("✘ not_sharded") < failed.index("<dt>ranks")
    patched = page({"make": audited(setups.ambient_order, 4, patched=True)}, HERE)
    verdict = "PASS" if audited(setups.ambient_order, 4, patched=True).verdict else "FAIL"
    assert f"1 of 1 {verdict} once patched<" in patched
    assert "make, before the patch" in patched
    assert "make, after the patch" in patched


def test_the_page_says_when_how_and_with_what_it_was_made() -> None:
    html = page({"train": audited(setups.uneven, 4)}, HERE)
    assert all(f"<dd>{told}</dd>" in html for told in ("some day", "ddp-patch audit &lt;x&gt;", "torch 9"))
    code = f"{Path(str(setups.__file__))}:{setups.uneven.__code__.co_firstlineno}"
    assert code.endswith(f"/{dict(audited(setups.uneven, 4).facts())['code']}".split("/tests/")[-1])
    assert {"python", "torch", "numpy", "ddp-patch"} <= set(Provenance("x").versions)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", Provenance("x").date)


def test_a_page_fits_any_width_and_ground() -> None:
    """No width in pixels but of what is small, and no colour of the ground but in the page's own style."""
    report = audited(loader(), 4, cost=range(23))
    part = report.html("train")
    assert all(int(width) <= 22 for width in re.findall(r'width="(\d+)"', part))
    in_bars = {"#3b8bd0", "#b87a00", "#d55e00", "#808a99"}
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", part)) <= {"#000", "#fff", *in_bars}
    assert part.count('width="100%"') == sum(len(figure.rows) for figure in shown_of(report))


def test_a_notebook_shows_a_report() -> None:
    report = audited(loader(), 4)
    shown = report._repr_html_()
    assert shown.startswith("<div><style>")
    assert shown.count("<pattern") == 3
    assert "NONE on 4 ranks".replace("NONE", report.name) in shown
    several = audit({"a": loader(), "<b>": loader()}, 2)._repr_html_()
    assert several.count("<style>") == 1
    assert several.count("<section") == 2
    assert "&lt;b&gt;" in several


def test_a_notebook_can_hide_one_report_and_show_another() -> None:
    """The patterns of each have names of their own, and each has its colour without them."""
    one, other = (audited(loader(), ranks)._repr_html_() for ranks in (2, 4))
    names = [set(re.findall(r'id="(.*?)"', shown)) for shown in (one, other)]
    assert not names[0] & names[1]
    for shown, known in zip((one, other), names, strict=True):
        filled = re.findall(r'fill="url\(#(.*?)\)(.*?)"', shown)
        assert filled
        assert {name for name, _ in filled} <= known
        assert all(re.fullmatch(" #[0-9a-f]{6}", colour) for _, colour in filled)
        assert 'class="ddp-once" fill="#' in shown


def test_the_strip_lies_above_the_rows() -> None:
    """Both have a column of names, of one width."""
    strip, who, *_ = map(figure_html, figures(loader(), 4))
    assert ">all ranks</span>" in strip
    assert strip.count("ddp-name") == 1
    assert who.count("ddp-name") == 4
    assert re.search(r"\.ddp-name \{[^}]*[^-]width: [\d.]+em", STYLE)


@pytest.mark.parametrize("ranks", [8, 48, 600, *map(soaked, (24, 96))])
def test_names_of_rows_have_room(ranks: int) -> None:
    report = audited(plain(2000), ranks, epochs=1)
    who = shown_of(report)[1]
    html = figure_html(who)
    names = re.findall(r'class="ddp-name"[^>]*>(.*?)<', html)
    gap = 0 if "ddp-low" in html else 2
    named = [at for at, name in enumerate(names) if name]
    assert len(names) == ranks
    assert all((after - before) * (who.height + gap) >= 14 for before, after in pairwise(named))


@pytest.mark.parametrize("name", ["no item", "one item", "string keys", "iterable, empty", "P x K batches", "iterable"])
def test_any_loader_can_be_pictured(name: str) -> None:
    report = audited(BY_NAME[name].make(), 3)
    html = page({"<b>&$x$": report}, HERE)
    assert "&lt;b&gt;&amp;$x$" in html
    assert ('class="ddp-figure' in html) == any(report.epochs[0].items)
    assert all(figure.alt and texts(figure) for figure in shown_of(report))


def test_names_are_no_markup() -> None:
    keys: Mapping[str, int] = dict.fromkeys(["$x$", "<a>", "a&b", "a long name"], 0)
    given: DataLoader[Any] = DataLoader(keys, sampler=[*keys])  # type: ignore[arg-type]  # keys
    names = texts(figures(given, 2)[1])
    assert {"'$x$'", "'<a>'", "'a&b'", "'a l…"} <= set(names)


def test_facts_and_json_say_what_was_counted() -> None:
    report, again = (audited(loader(), 4, patch=False) for _ in range(2))
    facts = dict(report.facts())
    assert facts["ranks"] == "4"
    assert facts["counted in"] == "samples"  # whether or not the ranks shard them
    assert dict(audited(loader(), 4).facts())["same order whatever the seed"] == "yes"
    assert re.fullmatch(r"\d+\.\d{3} s(; memory grew by -?\d+ MiB)?", facts["rank 0's sampling"])
    differs = {name for name, value in report.to_dict().items() if value != again.to_dict()[name]}
    assert differs <= {"seconds", "memory", "code"}


def test_the_command_line_writes_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch.utils.data import DataLoader\nx = DataLoader(range(9))\n")
    monkeypatch.setattr("sys.argv", ["ddp-patch", "audit", "it's"])
    result = CliRunner().invoke(commands, ["audit", "mine.py:x", "-w", "2", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    html = Path("page.html").read_text()
    assert "<dt>code</dt><dd>mine.py:2</dd>" in html
    assert "ddp-patch audit &#x27;it&#x27;" in html
