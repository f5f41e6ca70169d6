"""Hugging Face streams with share="by_worker" on ranks that torchrun starts, each with a world of its own."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from documented import CHECKOUT, SETTINGS
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RankMismatchError

FILES, ROWS = 4, 48
RANK_OF_ITS_OWN = """
export PYTHONHASHSEED=$((RANK + 1)) TMPDIR=$PWD/tmp$RANK HOME=$PWD/home$RANK HF_HOME=$PWD/home$RANK/hf TZ=UTC$RANK
mkdir -p $TMPDIR $HOME
exec "$@"
"""


def streams(folder: Path) -> dict[str, Any]:
    """Return streams of the same rows, made in several ways."""
    from datasets import IterableDataset, interleave_datasets, load_dataset

    def read(files: str = "rows-*.json") -> Any:
        return load_dataset("json", data_files={"train": f"{folder}/{files}"}, streaming=True)["train"]

    def numbers(shards: list[int]) -> Any:
        yield from ({"x": number} for shard in shards for number in range(shard, ROWS, FILES))

    return {
        "files": read(),
        "shuffled": read().shuffle(seed=0, buffer_size=5),
        "mapped": read().map(lambda row: {"x": row["x"]}).filter(lambda row: row["x"] >= 0),
        "torch": read().with_format("torch"),
        "interleaved": interleave_datasets(
            [read("rows-[01].json"), read("rows-[23].json")], stopping_strategy="all_exhausted"
        ),
        "generated": IterableDataset.from_generator(numbers, gen_kwargs={"shards": [*range(FILES)]}),
    }


def main(folder: Path) -> None:
    from datasets import load_dataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen: dict[str, Any] = {}
    for name, stream in streams(folder).items():
        loader = patch_dataloader_to_ddp(DataLoader(stream, 4, num_workers=2), share="by_worker", uneven="keep")
        seen[name] = [int(number) for batch in loader for number in batch["x"]]
    own = load_dataset("json", data_files=[f"{folder}/rows-{2 * rank + at}.json" for at in (0, 1)], streaming=True)
    for name, stream in {"own": own["train"], "shuffled": own["train"].shuffle(seed=0)}.items():
        try:
            patch_dataloader_to_ddp(DataLoader(stream, 4, num_workers=2), share="by_worker")
        except RankMismatchError as error:
            seen[f"{name} files"] = str(error)
    Path(f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def test_streams_are_read_by_ranks_that_are_unlike_each_other(tmp_path: Path) -> None:
    for file in range(FILES):
        rows = [json.dumps({"x": number}) for number in range(file, ROWS, FILES)]
        (tmp_path / f"rows-{file}.json").write_text("\n".join(rows))
    (tmp_path / "rank.sh").write_text(RANK_OF_ITS_OWN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start = [*launch, "--no-python", "bash", "rank.sh", sys.executable, __file__, str(tmp_path)]
    path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "tests")])
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
    subprocess.run(start, cwd=tmp_path, env=environment, check=True, timeout=240)  # noqa: S603 - ours
    ranks = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        for name in ("own files", "shuffled files"):
            said = rank.pop(name)
            assert "files']: " in said
            assert "from rows-0.json to " in said.partition(" on rank 0; ")[0]
            assert "from rows-2.json to " in said.partition(" on rank 0; ")[2]
    for name in ranks[0]:
        assert Counter(ranks[0][name] + ranks[1][name]) == Counter(range(ROWS)), name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
