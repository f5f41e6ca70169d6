"""What network.py makes is what it says, and is gone afterwards, even if a test is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from network import network, wait_for

MAKES_NODES = """
import sys, time
from pathlib import Path
from network import network

with network(Path(sys.argv[1]), 2) as net:
    net.nodes[1].start("sleep", 500)
    print(net.nodes[0].pid, net.nodes[1].pid, net.switch, flush=True)
    time.sleep(500)
"""


def test_a_node_has_its_own_of_all_and_reaches_the_others(tmp_path: Path) -> None:
    with network(tmp_path, 3) as net:
        for node in net.nodes:
            (node.own / "data").write_text(node.name)
            assert node.run("sh", "-c", "hostname; cat data; echo; ls /dev/shm").split() == [node.name] * 2
        host, guest = net.nodes[::2]
        server = host.start("python", "-m", "http.server", 29500)
        wait_for(lambda: "Serving" in server.output, server.shown)
        get = f"from urllib.request import urlopen; print(urlopen('http://{host.name}:29500/data').read().decode())"
        assert guest.run("python", "-c", get).split() == [host.name]
        net.unplug(guest)
        assert guest.start("timeout", 2, "python", "-c", get).wait() != 0
        net.plug(guest)
        assert guest.run("python", "-c", get).split() == [host.name]
    assert server.ended()


def test_nothing_is_left_of_nodes_whose_test_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", MAKES_NODES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as test:  # noqa: S603 - our own
        assert test.stdout is not None
        first = [Path(f"/proc/{pid}/ns/net") for pid in test.stdout.readline().decode().split()]
        assert len({path.readlink() for path in first}) == 3
        os.kill(test.pid, signal.SIGKILL)
    wait_for(lambda: not any(path.exists() for path in first))
