"""What goes wrong on several nodes alone is told, and ends all of them."""

import random
from pathlib import Path

import pytest
from network import Node, Program, network

PROGRAMS = Path(__file__).parent / "programs"
SIX_FILES = {f"file-{number}": [*range(5 * number, 5 * number + 5)] for number in range(6)}


def told(programs: list[Program]) -> str:
    """Return what is printed on all nodes, on each of which the program must fail."""
    assert 0 not in [program.wait() for program in programs], [program.output for program in programs]
    return "\n".join(program.output for program in programs)


@pytest.mark.parametrize(("size", "ranks"), [(2, 2), (3, 1)])
def test_the_number_on_the_node_is_taken_for_the_number_among_all(size: int, ranks: int, tmp_path: Path) -> None:
    with network(tmp_path, size) as net:
        output = told(net.torchrun(PROGRAMS / "numbered_by_local_rank.py", "patch", ranks=ranks))
        assert "RankMismatchError: rank= and num_replicas= contradict the process group" in output
        assert "LOCAL_RANK repeats on every node" in output


def test_a_sampler_has_the_number_on_the_node(tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        output = told(net.torchrun(PROGRAMS / "numbered_by_local_rank.py", "sampler"))
        assert "They were made for rank 0 of 2 on ranks 0, 1, so some samples would be lost or repeated" in output


def write(node: Node, files: dict[str, list[int]], order: list[str]) -> None:
    """Put data into a node's own folder."""
    folder = node.own / "data"
    folder.mkdir()
    for name, numbers in files.items():
        (folder / name).write_text(" ".join(map(str, numbers)))
    (folder / "order").write_text(" ".join(order))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("lines", "a file is missing"),
        ("stream", "a file is missing"),
        ("lines", "in another order"),
        ("held", "an older file"),
        ("stream", "an older file"),
    ],
)
def test_a_node_has_other_data(kind: str, how: str, tmp_path: Path) -> None:
    """An older file that is read only when a sample is needed cannot be told."""
    with network(tmp_path, 2) as net:
        for node in net.nodes:
            files, order = dict(SIX_FILES), [*SIX_FILES]
            if node is net.nodes[-1]:
                if how == "a file is missing":
                    del files[order.pop()]
                elif how == "in another order":
                    random.Random(1).shuffle(order)
                else:
                    files["file-1"] = [*range(105, 110)]
            write(node, files, order)
        programs = net.ranks(PROGRAMS / "of_this_node.py", kind)
        if (kind, how) == ("stream", "an older file"):  # numbers alone differ, as where each node augments
            assert [program.wait() for program in programs] == [0, 0]
            assert any("RankMismatchWarning" in program.output for program in programs)
        else:
            assert "RankMismatchError" in told(programs)
