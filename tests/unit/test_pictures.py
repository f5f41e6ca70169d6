"""The page with pictures: one file, readable without colour, with what was found in it."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import audit_setups as setups
import pytest
from click.testing import CliRunner
from zoo import BY_NAME, loader

from ddp_patch import audit
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.pictures import page


def svgs(html: str) -> list[ElementTree.Element]:
    parts = html.split("<svg")[1:]
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in parts]  # noqa: S314 - ours


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def test_it_holds_all_that_it_shows() -> None:
    html = page({"train": audit(loader(), 4)})
    assert "http" not in html
    assert "src=" not in html
    assert "prefers-color-scheme: dark" in html
    assert "✔ all 1 hold" in html


def test_padding_and_repeats_are_marked_without_colour() -> None:
    padded = svgs(page({"x": audit(loader(), 4)}))[0]
    assert "0P" in texts(padded)
    assert sum(text.endswith("P") for text in texts(padded)) == 1
    repeated = svgs(page({"x": audit(setups.not_sharded_in_order, 2)}))[0]
    assert "5!" in texts(repeated)
    assert "5" in texts(repeated)


def test_steps_that_a_rank_does_not_make_are_crossed() -> None:
    html = page({"x": audit(setups.uneven, 4)})
    assert "✘ 1 of 1 do not hold" in html
    assert html.count("makes no step 6") == 3
    assert "rank 0, step 6: 1 samples" in html


def test_cost_is_drawn_where_it_is_known() -> None:
    assert "Cost of each step" not in page({"x": audit(loader(), 2)})
    assert "polyline" in page({"x": audit(loader(), 2, cost=range(23))})


@pytest.mark.parametrize("name", ["no item", "one item", "string keys", "iterable, empty", "P x K batches", "iterable"])
def test_any_loader_can_be_pictured(name: str) -> None:
    for svg in svgs(page({"<b>&": audit(BY_NAME[name].make(), 3)})):
        assert svg.attrib["aria-label"]


def test_the_command_line_writes_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch.utils.data import DataLoader\nx = DataLoader(range(9))\n")
    result = CliRunner().invoke(commands, ["audit", "mine.py:x", "-w", "2", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    assert "<svg" in Path("page.html").read_text()
