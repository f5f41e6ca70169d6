"""What the pages show runs on several nodes as it stands, and prints what one node prints."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import CHECKOUT
from network import Program, network, of_nodes, wait_for, with_path

EXAMPLES = CHECKOUT / "docs" / "examples"
SETTINGS: dict[str, Any] = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
NUMBERS = re.compile(r"\d\.\d+")


def printed(programs: list[Program]) -> str:
    """Return what the program on the node of rank 0 has printed; all must succeed."""
    for program in programs:
        assert program.wait() == 0, program.output
    (found,) = [told for program in programs if (told := lines_of(program))]
    return found


def lines_of(program: Program) -> str:
    return "\n".join(re.findall(r"^(?:epoch .*|Mean loss.*|Batches.*)$", program.output, re.M))


@pytest.mark.parametrize("size", [2, 3])
def test_the_example_prints_what_one_node_prints(size: int, tmp_path: Path) -> None:
    with network(tmp_path, size) as net:
        script = EXAMPLES / "ddp.py"
        on_all = printed(net.torchrun(script))
        alone = ["torchrun", "--standalone", "--nproc-per-node", size, script]
        assert on_all == printed([net.nodes[-1].start(*alone)])
        assert on_all.count("on 101 samples") == 3


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    with network(tmp_path, size) as net:
        assert "Mean loss" in printed(net.torchrun(EXAMPLES / "evaluation.py"))  # which compares it


def test_the_command_for_several_nodes_as_it_stands(tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        for node in net.nodes:
            shutil.copy(EXAMPLES / "ddp.py", node.own / "train.py")
        on_all = printed(net.start("bash", "-e", EXAMPLES / "launch" / "nodes.sh"))
        assert on_all.count("on 101 samples") == 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_script_of_one_process_prints_the_same_on_nodes(size: int, tmp_path: Path) -> None:
    with network(tmp_path, size) as net:
        script = EXAMPLES / "single.py"
        alone = printed([net.nodes[0].start("ddp-patch", "run", "-n", 1, script)])
        assert printed(net.start("ddp-patch", "run", *of_nodes(size), script)) == alone
        assert alone.count("on 101 samples") == 3


# Where each is killed once it has written a checkpoint, and on how many ranks of one node it goes on.
RECIPES = [("vision.py", "checkpoint.pt", 1), ("text.py", "checkpoint.pt", 1), ("stream.py", "", 2)]


@pytest.mark.parametrize(("name", "below", "ranks"), RECIPES)
def test_a_checkpoint_of_two_nodes_goes_on_on_one(name: str, below: str, ranks: int, tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        script = EXAMPLES / "recipes" / name
        alone = ["torchrun", "--standalone", "--nproc-per-node", ranks, script]
        whole, stopped = (net.shared / kind for kind in ("whole", "stopped"))
        whole.mkdir()
        stopped.mkdir()
        *_, expected = printed([net.nodes[0].start(*alone, whole / below, **SETTINGS)]).splitlines()
        programs = net.torchrun(script, stopped / below, **SETTINGS)
        checkpoint = stopped / "checkpoint.pt"
        wait_for(lambda: checkpoint.exists() or any(program.ended() for program in programs), programs[0].shown)
        for node in net.nodes:
            node.kill()
        assert checkpoint.exists(), [program.output for program in programs]
        epoch = torch.load(checkpoint, weights_only=True)["training"]["epoch"]
        first, *_, last = printed([net.nodes[1].start(*alone, stopped / below, **SETTINGS)]).splitlines()
        assert first.startswith(f"epoch {epoch}: ")
        assert [*map(float, NUMBERS.findall(last))] == pytest.approx([*map(float, NUMBERS.findall(expected))], abs=0.02)


def test_a_checkpoint_of_lightning_on_two_nodes_goes_on_on_one(tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        recipe, checkpoint = EXAMPLES / "recipes" / "lightning_metrics.py", net.shared / "last.ckpt"
        on_nodes = Path(__file__).parent / "programs" / "lightning_on_nodes.py"
        programs = net.torchrun(on_nodes, 2, net.shared, PYTHONPATH=with_path(recipe.parent))
        wait_for(lambda: checkpoint.exists() or any(program.ended() for program in programs), programs[0].shown)
        for node in net.nodes:
            node.kill()
        assert checkpoint.exists(), [program.output for program in programs]
        output = net.nodes[1].run("python", recipe, 1, net.shared)
        assert "Restor" in output
        (accuracy,) = re.findall(r"accuracy (\d\.\d+)", output)
        assert float(accuracy) > 0.8


def test_each_sample_comes_once_where_workers_divide_files(tmp_path: Path) -> None:
    with network(tmp_path, 3) as net:
        for part in range(12):
            (net.shared / f"part-{part:02}").write_text(" ".join(map(str, range(part * 7, part * 7 + 7))))
        programs = net.torchrun(Path(__file__).parent / "programs" / "by_worker.py", net.shared)
        assert [program.wait() for program in programs] == [0] * 3, [program.output for program in programs]
        given = [line for file in net.shared.glob("given-*") for line in file.read_text().splitlines()]
        assert sorted(given) == sorted(f"{epoch} {number}" for epoch in range(2) for number in range(84))
