"""Every command with torchrun that the README, the pages and the examples show, and what runs it.

``tests/unit/test_pages.py`` searches for the commands and holds them against this table. Each is run twice, by real
torchrun: as it stands, and on ranks that are as unlike as those of several machines (``run_twice``).
"""

import re
from collections.abc import Iterator

from documented import CHECKOUT

__all__ = ["COMMANDS", "NOT_RUN", "READERS", "found_in_pages"]

ALONE = "torchrun --standalone --nproc-per-node"
HERE = "tests/ranks/test_commands_ranks.py"
PACKAGES = "tests/integrations/test_commands.py"
# A page runs the commands of its console blocks; FOLDER and the like stand for what the reader chooses.
COMMANDS = {
    f"{ALONE} 2 docs/examples/ddp.py": "README.md",
    f"{ALONE} 2 docs/examples/coming_from/from_distributed_sampler.py": "docs/frameworks.md",
    f"{ALONE} 2 docs/examples/hard_examples.py": "docs/samplers.md",
    f"{ALONE} 2 docs/examples/order_of_rank_0.py": "docs/samplers.md",
    f"{ALONE} 3 docs/examples/evaluation.py": "docs/evaluation.md",
    f"{ALONE} 1 docs/examples/training.py": "docs/training.md",
    f"{ALONE} 3 docs/examples/training.py": "docs/training.md",
    f"{ALONE} 4 docs/examples/tensor_parallel.py": "docs/training.md",
    f"{ALONE} 3 docs/examples/loops.py": "docs/training.md",
    f"{ALONE} 2 docs/examples/streams/webdataset_shards.py $(mktemp -d)": "docs/streams.md",
    f"{ALONE} 2 docs/examples/streams/files.py $(mktemp -d)": "docs/streams.md",
    f"{ALONE} 2 docs/examples/recipes/vision.py $(mktemp -d)/checkpoint.pt": "docs/recipes.md",
    f"{ALONE} 1 docs/examples/recipes/text.py $(mktemp -d)/checkpoint.pt": "docs/recipes.md",
    f"{ALONE} 2 docs/examples/recipes/text.py $(mktemp -d)/checkpoint.pt": "docs/recipes.md",
    f"{ALONE} 2 docs/examples/recipes/stream.py $(mktemp -d)": "docs/recipes.md",
    f"{ALONE} 2 docs/examples/early_stopping.py $(mktemp -d)": "docs/resume.md",
    f"{ALONE} 2 docs/examples/resume.py FOLDER": HERE,
    f"{ALONE} 2 --max-restarts 3 docs/examples/resume.py FOLDER": HERE,
    f"{ALONE} 3 docs/examples/step_metrics.py": PACKAGES,
    f"{ALONE} 2 vision.py checkpoint.pt": PACKAGES,
    f"{ALONE} 2 text.py checkpoint.pt": PACKAGES,
    f"{ALONE} 2 stream.py FOLDER": PACKAGES,
    # With stand-ins for the cluster's programs.
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id my-job --rdzv-backend c10d "
    "--rdzv-endpoint node-a:29500 train.py": "tests/unit/test_pages.py",
    'torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --rdzv-id "$SLURM_JOB_ID" '
    '--rdzv-backend c10d --rdzv-endpoint "$head:$port" train.py': "tests/unit/test_pages.py",
}
# The script is the reader's own: HERE runs these with the README's in its place.
READERS = [f"{ALONE} {ranks} train.py" for ranks in (1, 2, 8)]
# Nothing runs this one: it needs torchft's lighthouse. The session torchft starts the same script's replicas itself.
NOT_RUN = ["torchrun --nproc-per-node 1 --master-port 29601 torchft_replicas.py FOLDER NAME"]

_OPTION = r"\s+-[^\s`]+(?:\s+(?:\"[^\"]*\"|[^-\s`\\]\S*(?<!\.py)))?(?:\s+\\\n)?"
_COMMAND = re.compile(rf"torchrun(?:{_OPTION})+\s+[^\s`]+\.py\b[^`\n]*")


def found_in_pages() -> Iterator[tuple[str, str]]:
    """Yield each command with torchrun that runs a script, and the file that shows it."""
    pages = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *(CHECKOUT / "docs").glob("*.md")]
    scripts = [path for kind in ("py", "sh") for path in (CHECKOUT / "docs" / "examples").rglob(f"*.{kind}")]
    for path in [*pages, *scripts]:
        for command in _COMMAND.findall(path.read_text()):
            yield " ".join(command.replace("\\\n", " ").split()).rstrip("."), str(path.relative_to(CHECKOUT))
