"""Two hosts, as far as the network tells: ranks are counted over all of them, never on one host."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo import N

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from zoo import loader
from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())
patched = patch_dataloader_to_ddp(loader(shuffle=True))
share = [item for batch in patched for item in batch]
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump({"share": share, "local_rank": os.environ["LOCAL_RANK"]}, file)
dist.monitored_barrier()
dist.destroy_process_group()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)  # noqa: S603, S607 - the system's own


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces that a cable joins, 10.77.0.1 and 10.77.0.2, each seeing the other only through it."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces, and there is no `ip` (iproute2) here to make them")
    names = [f"ddp-patch-{os.getpid()}-{host}" for host in "ab"]
    cables = [f"dp{os.getpid() % 100000}{host}" for host in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for address, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("-n", name, "address", "add", f"10.77.0.{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove(names)
        pytest.skip(f"two hosts need network namespaces, and this process may not make them: {error.stderr.decode()}")
    yield names
    remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)  # noqa: S603, S607 - as above


@pytest.mark.soak  # two agents, which import torch for each of their ranks
def test_torchrun_on_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (out := tmp_path / "out").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    place = ["--master-addr=10.77.0.1", "--master-port=29511"]  # a port of the namespace's own
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(  # noqa: S603 - our own script
            ["ip", "netns", "exec", host, *torchrun, f"--node-rank={node}", *place, tmp_path / "script.py", out],  # noqa: S607
            env=environment | {"GLOO_SOCKET_IFNAME": f"dp{os.getpid() % 100000}{'ab'[node]}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, host in enumerate(hosts)
    ]
    try:
        said = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    ranks = [json.loads((out / str(rank)).read_text()) for rank in range(4)]
    assert [rank["local_rank"] for rank in ranks] == ["0", "1", "0", "1"]
    together = Counter(item for rank in ranks for item in rank["share"])
    assert set(together) == set(range(N))
    assert together.total() == 24
