"""A node's link goes down within an epoch and comes back: ranks go on or end by an error, and go on comparing."""

from pathlib import Path
from time import sleep

import pytest
from network import Network, Program, network, wait_for

PROGRAM = Path(__file__).parent / "programs" / "long_epochs.py"
SHORT_S, LONG_S = 3, 20


def down_for(net: Network, programs: list[Program], seconds: float) -> None:
    """Let the link of the last node go down for some time, once all ranks have made some steps."""
    wait_for(lambda: all(len(given(net)[place]) > 8 for place in range(len(programs))), programs[0].shown)
    net.unplug(net.nodes[-1])
    sleep(seconds)
    net.plug(net.nodes[-1])


def given(net: Network) -> list[list[str]]:
    """Return the steps that each rank has told."""
    files = [node.own / "steps" for node in net.nodes]
    return [file.read_text().splitlines() if file.exists() else [] for file in files]


@pytest.mark.parametrize("meets", ["meets", "never"])
def test_ranks_go_on_when_a_link_is_back_soon(meets: str, tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        programs = net.ranks(PROGRAM, meets, 120, "right")
        down_for(net, programs, SHORT_S)
        assert [program.wait() for program in programs] == [0, 0], [program.output for program in programs]
        samples = [word for steps in given(net) for step in steps if step[0] == "0" for word in step.split()[1:]]
        assert sorted(map(int, samples)) == [*range(400)]
        assert "Warning" not in "".join(program.output for program in programs)


@pytest.mark.parametrize("meets", ["meets", "never"])
def test_a_mistake_after_a_link_was_down_is_told(meets: str, tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        programs = net.ranks(PROGRAM, meets, 120, "wrong")
        down_for(net, programs, SHORT_S)
        assert 0 not in [program.wait() for program in programs], [program.output for program in programs]
        assert "RankMismatchError" in "".join(program.output for program in programs)


def test_ranks_that_meet_end_by_an_error_when_a_link_stays_down(tmp_path: Path) -> None:
    with network(tmp_path, 2) as net:
        programs = net.ranks(PROGRAM, "meets", 10, "right")
        down_for(net, programs, LONG_S)
        assert 0 not in [program.wait() for program in programs], [program.output for program in programs]


def test_a_rank_whose_connection_to_the_store_breaks_says_so(tmp_path: Path) -> None:
    """The kernel gives the connection up after some seconds here, else after a quarter of an hour."""
    with network(tmp_path, 2) as net:
        for node in net.nodes:
            node.run("bash", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2")
        programs = net.ranks(PROGRAM, "never", 120, "wrong")
        down_for(net, programs, LONG_S)
        for program in programs:
            program.wait()
        assert programs[-1].wait() or "Warning: " in programs[-1].output, programs[-1].output
