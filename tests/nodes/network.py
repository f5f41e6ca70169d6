"""Nodes on one machine, each with a network, a host name, processes, mounts and folders of its own.

A node is made of Linux namespaces, and a switch joins it with the others: a bridge in a namespace of its own. No
namespace has a name, so each is there as long as its first process, and that ends with whoever made it, by whatever
means: nothing is left behind. Needs root and Debian's package iproute2.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

__all__ = ["Network", "Node", "Program", "network", "of_nodes", "wait_for", "with_path"]

LIMIT_S = 300.0  # after which a test fails
_EXISTS_S = 1500  # after which a node is gone, whatever still runs there
_PORT = 29500  # each node has all ports
_UNSHARED = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_ENTERED = ["--net", "--uts", "--ipc", "--mount", "--pid"]
# The first process of a node: when its standard input ends, so does it, and with it all others of its namespaces.
_FIRST = """
hostname "$0"
ip link set lo up
[ ! -e "$1/$0" ] || mount --bind "$1/$0" "$1/here"
[ ! -e "$1/hosts" ] || mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs none /dev/shm
echo made
read -rt "$2" || true
"""


@dataclass
class Program:
    """A program that runs on a node.

    Attributes:
        process: What started it.
        file: What it has printed, on both outputs.
    """

    process: "subprocess.Popen[bytes]"
    file: Path

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.file.read_text(errors="replace")

    def shown(self) -> str:
        """Return what it has printed so far."""
        return self.output

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self.process.poll() is not None

    def wait(self) -> int:
        """Wait until it ends; return its status."""
        wait_for(self.ended, self.shown)
        return self.process.wait()


@dataclass
class Node:
    """A machine, as programs see it.

    Attributes:
        name: Its host name.
        number: Which it is, from 0.
        pid: Its first process.
        shared: A folder that all nodes have, as over a network.
        here: A path under which each node has a folder of its own.
        own: That folder, as the test sees it.
        programs: Those that were started.
    """

    name: str
    number: int
    pid: int
    shared: Path
    here: Path
    own: Path
    programs: list[Program] = field(default_factory=list)

    def start(self, *command: object, **environment: object) -> Program:
        """Start a program in this node's folder, with an environment of this node's."""
        settings = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH") if name in os.environ}
        settings |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        settings |= {
            "HOME": str(self.here / "home"),
            "TMPDIR": str(self.here / "tmp"),
            "PYTHONHASHSEED": f"{self.number + 1}",
        }
        settings |= {"TZ": f"Etc/GMT+{self.number}", "PYTHONUNBUFFERED": "1"}
        settings |= {name: str(value) for name, value in environment.items()}
        file = self.own / f"output-{len(self.programs)}"
        with file.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - users' programs, in a network that leads nowhere
                [*_entered(self.pid), f"--wdns={self.here}", *map(str, command)],
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.programs.append(Program(process, file))
        return self.programs[-1]

    def run(self, *command: object, **environment: object) -> str:
        """Run a program that must succeed; return what it prints."""
        program = self.start(*command, **environment)
        assert program.wait() == 0, program.output
        return program.output

    def kill(self) -> None:
        """Kill all programs, at once, as if the power went off and came back."""
        self.start("kill", "-KILL", "-1").wait()
        for program in self.programs:
            program.wait()


@dataclass
class Network:
    """Nodes that reach each other, and nothing else.

    Attributes:
        nodes: All of them: node-a, node-b, ...
        switch: The first process of what joins them.
        shared: A folder that all nodes have.
    """

    nodes: Sequence[Node]
    switch: int
    shared: Path

    def unplug(self, node: Node) -> None:
        """Pull a node's cable out of the switch: whoever sends to it hears nothing."""
        _call(*_entered(self.switch), "ip", "link", "set", f"port{node.number}", "down")

    def plug(self, node: Node) -> None:
        """Put it back."""
        _call(*_entered(self.switch), "ip", "link", "set", f"port{node.number}", "up")

    def start(self, *command: object, **environment: object) -> list[Program]:
        """Start the same program on each node."""
        return [node.start(*command, **environment) for node in self.nodes]

    def ranks(self, *arguments: object, **environment: object) -> list[Program]:
        """Start a script as one rank on each node, which no torchrun ends when another fails."""
        settings = {"MASTER_ADDR": self.nodes[0].name, "MASTER_PORT": _PORT, "WORLD_SIZE": len(self.nodes)}
        settings |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **environment}
        return [node.start("python", *arguments, RANK=node.number, **settings) for node in self.nodes]

    def torchrun(self, *arguments: object, ranks: int = 1, **environment: object) -> list[Program]:
        """Start a script under torchrun, with so many ranks on each node."""
        return self.start("torchrun", *of_nodes(len(self.nodes), ranks), *arguments, **environment)


def of_nodes(size: int, ranks: int = 1) -> list[str]:
    """Return the options that start so many ranks on each of so many nodes, of which node-a is one."""
    options = {"nnodes": size, "nproc-per-node": ranks, "rdzv-id": "my-job", "rdzv-backend": "c10d"}
    return [f"--{name}={value}" for name, value in {**options, "rdzv-endpoint": f"node-a:{_PORT}"}.items()]


def with_path(folder: Path) -> str:
    """Return where Python looks for modules: in a folder, too."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


@contextmanager
def network(folder: Path, size: int) -> Iterator[Network]:
    """Make so many nodes, and remove them in the end."""
    names = [f"node-{letter}" for letter in "abcdefgh"[:size]]
    shared, here = folder / "shared", folder / "here"
    for made in (shared, here, *(folder / name / part for name in names for part in ("home", "tmp"))):
        made.mkdir(parents=True)
    hosts = [f"10.77.0.{number} {name}\n" for number, name in enumerate(names, start=1)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
    with ExitStack() as first:
        switch = first.enter_context(_first_process("switch", folder))
        _call(*_entered(switch), "ip", "link", "add", "bridge", "up", "type", "bridge")
        pids = [first.enter_context(_first_process(name, folder)) for name in names]
        for number, pid in enumerate(pids):
            port = f"port{number}"
            _call("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", pid)
            _call(*_entered(switch), "ip", "link", "set", port, "master", "bridge", "up")
            _call(*_entered(pid), "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _call(*_entered(pid), "ip", "link", "set", "eth0", "up")
        nodes = [Node(name, place, pids[place], shared, here, folder / name) for place, name in enumerate(names)]
        try:
            yield Network(nodes, switch, shared)
        finally:
            for node in nodes:
                node.kill()


@contextmanager
def _first_process(name: str, folder: Path) -> Iterator[int]:
    """Make the namespaces of a node or of a switch; yield the process that keeps them."""
    command = [*_UNSHARED, "bash", "-ec", _FIRST, name, str(folder), str(_EXISTS_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as unshare:  # noqa: S603 - our own
        assert unshare.stdin is not None
        assert unshare.stdout is not None
        try:
            assert unshare.stdout.readline() == b"made\n"
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text()
            yield int(children)
        finally:
            unshare.stdin.close()
            unshare.wait(LIMIT_S)


def _entered(pid: int) -> list[str]:
    """Return the command that runs another in the namespaces of a process."""
    return ["nsenter", "--target", f"{pid}", *_ENTERED]


def _call(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, timeout=60)  # noqa: S603 - our own


def wait_for(is_so: Callable[[], bool], otherwise: Callable[[], str] = str, limit_s: float = LIMIT_S) -> None:
    """Wait until something is so; say something else if it takes too long."""
    until = monotonic() + limit_s
    while not is_so():
        assert monotonic() < until, f"it takes longer than {limit_s:g} s:\n{otherwise()}"
        sleep(0.02)
