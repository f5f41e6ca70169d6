"""The commands that docs/gpu.md shows for several nodes and SLURM start what they should."""

import os
import subprocess
from pathlib import Path

import pytest
from documented import CHECKOUT
from torch.distributed.run import get_args_parser

FOLDER = CHECKOUT / "docs" / "examples" / "launch"
# Stand for the cluster's programs: each notes how it was called.
PROGRAMS = {
    "torchrun": 'printf "%s\\n" "$@" > called; echo "${SRUN_CPUS_PER_TASK-}" > cpus',
    "srun": 'exec "$@"',
    "scontrol": '[[ $* = "show hostnames node-[a-b]" ]] && printf "node-a\\nnode-b\\n"',
}
SLURM = {
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_JOB_ID": "123456",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "32",
}


@pytest.mark.parametrize(
    ("script", "ranks_of_node", "job", "endpoint", "cpus"),
    [("nodes.sh", "8", "my-job", "node-a:29500", ""), ("slurm.sh", "4", "123456", "node-a:29956", "32")],
)
def test_torchrun_is_started_with_what_makes_one_job_of_the_nodes(
    script: str, ranks_of_node: str, job: str, endpoint: str, cpus: str, tmp_path: Path
) -> None:
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, **SLURM, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", str(FOLDER / script)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)  # noqa: S603 - our own scripts
    called = get_args_parser().parse_args((tmp_path / "called").read_text().splitlines())
    assert (called.nnodes, called.nproc_per_node, called.training_script) == ("2", ranks_of_node, "train.py")
    assert (called.rdzv_id, called.rdzv_backend, called.rdzv_endpoint) == (job, "c10d", endpoint)
    assert (tmp_path / "cpus").read_text().strip() == cpus
