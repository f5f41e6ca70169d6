"""torchft's replicas, one a node: a node fails and comes back, and each sample of an epoch comes once."""

import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from documented import CHECKOUT
from network import Node, Program, network, wait_for, with_path

EXAMPLES = CHECKOUT / "docs" / "examples" / "frameworks"
SCRIPT = Path(__file__).parent / "programs" / "slow_replica.py"
LIGHTHOUSE: list[object] = ["torchft_lighthouse", "--bind", "[::]:29510", "--min_replicas", 2, "--quorum_tick_ms", 20]
LIGHTHOUSE += ["--join_timeout_ms", 1000, "--heartbeat_timeout_ms", 1000]


def steps(folder: Path, name: str) -> int:
    """Return how many steps a replica has committed, in all of its lives."""
    lines = [line for log in folder.glob(f"log-{name}-*") for line in log.read_text().splitlines()]
    return sum("is_committed" in json.loads(line) for line in lines if line.endswith("}"))


def test_a_node_fails_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (EXAMPLES, CHECKOUT / "benchmarks"):
        monkeypatch.syspath_prepend(folder)
    replicas: Any = import_module("replicas")  # which reads the replicas' logs
    with network(tmp_path, 3) as net:
        net.nodes[0].start(*LIGHTHOUSE)

        def start(node: Node) -> Program:
            where = ["--master-addr", node.name, "--master-port", 29601]
            command = ["torchrun", "--nproc-per-node", 1, *where, SCRIPT, net.shared, node.name]
            return node.start(*command, TORCHFT_LIGHTHOUSE="http://node-a:29510", PYTHONPATH=with_path(EXAMPLES))

        programs = [start(node) for node in net.nodes]

        def wait_for_steps(more: int) -> None:
            before = steps(net.shared, "node-c")
            wait_for(lambda: steps(net.shared, "node-c") >= before + more, programs[-1].shown)

        wait_for_steps(4)
        net.nodes[-1].kill()
        programs[-1] = start(net.nodes[-1])
        wait_for_steps(1)
        assert [program.wait() for program in programs] == [0] * 3, [program.output for program in programs]
        run = replicas.Run.of(net.shared, [])
        assert run.counted() == {epoch: Counter(range(240)) for epoch in range(3)}
        assert len(run.networks) == 3
