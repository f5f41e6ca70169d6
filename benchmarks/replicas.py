"""Kill replicas of torchft by SIGKILL, and count in which committed steps each sample came; writes a table.

Run it with ``nox -s torchft``; ``-- --schedules 1`` is short. Each schedule kills a replica in an epoch, lets two go on
until it has come back, and kills another in the middle of a step, and another at any moment. ``docs/torchft.md`` holds
its table. It fails where a sample of an epoch did not come exactly once in the committed steps, or where the trained
parameters are not those of one process, although each batch is that of one process.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, product
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torchft_replicas as example
from pages import show_and_put
from torch.utils.data import DataLoader
from torchft.data import DistributedSampler
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from ddp_patch import patch_dataloader_to_ddp

REPLICAS, LIMIT_S = 3, 180
DIVIDED = {"share": "within_batches"}
KINDS = [*product(["map-style", "stream"], [0, 2], [{}]), ("map-style", 0, DIVIDED), ("stream", 2, DIVIDED)]
TORCHFTS = "torchft's sampler"
PAGE = Path(__file__).parents[1] / "docs" / "torchft.md"
OURS, SHARED = "each replica its own", "one process's, divided"
processes = multiprocessing.get_context("forkserver")


@dataclass
class Run:
    """What came of one training.

    Attributes:
        taken: The lines of the replicas that say what they took; each with the name of its process.
        committed: Those that say that they have committed.
        killed: When each was killed.
        networks: What the replicas trained that came to the end.
    """

    taken: list[dict[str, Any]] = field(default_factory=list)
    committed: list[dict[str, Any]] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    networks: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, killed: Sequence[float]) -> "Run":
        """Read the logs; a replica that was killed may have left half of a line."""
        run = cls(killed=[*killed], networks=[torch.load(path) for path in sorted(folder.glob("network-*"))])
        for log in folder.glob("log-*"):
            for line in log.read_text().splitlines():
                with suppress(json.JSONDecodeError):
                    read = {**json.loads(line), "by": log.name}
                    (run.committed if "is_committed" in read else run.taken).append(read)
        return run

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the epoch and the samples of each committed step.

        If all that have committed a step were killed then, others did it again, and that one is what counts. A replica
        that is healed meanwhile took nothing.
        """
        commits = [line for line in self.committed if line["rank"] is not None]
        latest = {line["step"]: line for line in sorted(commits, key=lambda line: line["at"])}
        require(sorted(latest) == [*range(len(latest))], "a step is missing")
        for step, commit in sorted(latest.items()):
            before = [line for line in self.taken if line["step"] == step and line["at"] < commit["at"]]
            mine = max((line for line in before if line["by"] == commit["by"]), key=lambda line: line["at"])
            shares = {line["rank"]: line for line in sorted(before, key=lambda line: line["at"])}
            of_all = [shares[rank] for rank in range(mine["replicas"])]
            alike = {(line["epoch"], line["replicas"]) for line in of_all}
            require(alike == {(mine["epoch"], mine["replicas"])}, f"the replicas took others' batches in step {step}")
            yield mine["epoch"], list(chain.from_iterable(line["indices"] for line in of_all))

    def counted(self) -> Mapping[int, Counter[int]]:
        """Return how often each sample came in the committed steps of each epoch."""
        found: dict[int, Counter[int]] = defaultdict(Counter)
        for epoch, samples in self.steps():
            found[epoch].update(samples)
        return found

    @property
    def stops_s(self) -> list[float]:
        """How long after each kill the next step was committed."""
        return [min(line["at"] for line in self.committed if line["at"] > at) - at for at in self.killed]

    @property
    def steps_again(self) -> int:
        """How often a replica was given a step that it had been given before."""
        given = Counter((line["by"], line["step"]) for line in self.taken)
        return max((sum(count - 1 for (by, _), count in given.items() if by == one) for one, _ in given), default=0)


def as_replica(
    address: str, folder: Path, name: str, kind: str, workers: int, is_async: bool, options: Mapping[str, Any]
) -> None:
    """Be one replica, with a store of its own, as torchrun starts one."""
    os.setsid()  # what it starts can be killed with it
    multiprocessing.set_start_method("fork", force=True)  # of its workers, as elsewhere
    with (folder / f"{name}-{os.getpid()}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    if kind == TORCHFTS:
        with_torchfts_sampler(folder, name)
    else:
        example.main(folder, name, example.make_loader(kind, workers), is_async=is_async, **options)
    os._exit(0)  # torchft's threads may outlive what is done


def with_torchfts_sampler(folder: Path, name: str) -> None:
    """Train as torchft's own example does, for as many steps as three epochs have for three replicas."""
    network, optimizer = example.make_model()
    manager = Manager(
        ProcessGroupGloo(),
        load_state_dict=network.load_state_dict,
        state_dict=lambda: {**network.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=name,
    )
    data = example.make_loader().dataset
    sampler = DistributedSampler(data, int(name[-1]), REPLICAS, group_rank=0, num_replicas=1, seed=7)
    loader: DataLoader[Any] = DataLoader(data, example.BATCH_SIZE, sampler=sampler)
    log = example.logging_to(folder, name, manager)
    epoch, steps = 0, example.EPOCHS * len(loader)
    while manager.current_step() < steps:
        sampler.set_epoch(epoch)
        for x, y, indices in loader:
            manager.start_quorum()
            log(step := manager.current_step(), epoch=0, indices=indices.tolist())
            time.sleep(example.STEP_S)
            optimizer.zero_grad()
            (network(x) - y).square().mean().backward()
            for parameter in network.parameters():
                manager.allreduce(parameter.grad).wait()
            if manager.should_commit():
                optimizer.step()
                log(step, is_committed=True)
            if manager.current_step() >= steps:
                break
        epoch += 1
    manager.shutdown()


class Replicas:
    """The replicas of one training, some of which are killed."""

    def __init__(self, address: str, folder: Path, *what: Any) -> None:
        self.address, self.folder, self.what = address, folder, what
        self.started: list[BaseProcess] = []
        self.running: dict[int, BaseProcess] = {}
        self.killed: list[float] = []
        for number in range(REPLICAS):
            self.start(number)

    def start(self, number: int) -> None:
        """Start one, which was not there, or was killed."""
        self.running[number] = process = processes.Process(
            target=as_replica, args=(self.address, self.folder, f"replica_{number}", *self.what)
        )
        process.start()
        self.started.append(process)

    def lines(self, number: int) -> list[str]:
        """Return what the process that is this replica now has logged."""
        with suppress(FileNotFoundError):
            log = self.folder / f"log-replica_{number}-{self.running[number].pid}"
            return log.read_text().splitlines()
        return []

    def wait_for(self, number: int, taken: int) -> None:
        """Wait until a replica was given so many batches."""
        until = time.monotonic() + LIMIT_S
        while sum("indices" in line for line in self.lines(number)) < taken:
            self.require_all(until)
            time.sleep(0.002)

    def require_all(self, until: float) -> None:
        """Raise if one has failed, or time is over."""
        require(time.monotonic() < until, f"it takes longer than {LIMIT_S} s")
        for number, process in self.running.items():
            require(process.exitcode in {None, 0}, f"replica {number} has failed:\n{self.output(number)}")

    def output(self, number: int) -> str:
        """Return the end of what a replica has written."""
        path = self.folder / f"replica_{number}-{self.running[number].pid}.txt"
        return "\n".join(path.read_text().splitlines()[-40:]) if path.exists() else ""

    def kill(self, number: int) -> None:
        """Kill one, at once."""
        os.kill(self.running[number].pid or 0, signal.SIGKILL)
        self.killed.append(time.time())
        self.running.pop(number).join()

    def join(self) -> None:
        """Wait until all have done their last step."""
        until = time.monotonic() + LIMIT_S
        while any(process.exitcode is None for process in self.running.values()):
            self.require_all(until)
            time.sleep(0.02)

    def end(self) -> None:
        """End all, with their workers."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


@contextmanager
def lighthouse() -> Iterator[str]:
    """Where the replicas find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"min_replicas": 2, "quorum_tick_ms": 20, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 1000}
    command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # noqa: S603 - torchft's
        try:
            yield f"http://localhost:{port}"
        finally:
            process.kill()


def train(schedule: int, kind: str, workers: int, options: Mapping[str, Any]) -> Run:
    """Train while replicas are killed as a schedule says."""
    plan = random.Random(schedule)
    one, other = plan.sample(range(REPLICAS), 2)
    first, second, third = (plan.randint(*steps) for steps in ((3, 8), (1, 4), (1, 4)))
    with TemporaryDirectory() as kept, lighthouse() as address:
        folder = Path(kept)
        replicas = Replicas(address, folder, kind, workers, bool(schedule % 2), options)
        try:
            for number, taken, delay_s in [
                (one, first, plan.random() * example.STEP_S * 1.5),
                (other, second, plan.random() * example.STEP_S * 0.8),  # before it has sent its gradients
                (plan.randrange(REPLICAS), third, plan.random() * example.STEP_S * 1.5),
            ]:
                replicas.wait_for(number, taken + len(replicas.lines(number)) // 2)
                time.sleep(delay_s)
                replicas.kill(number)
                time.sleep(plan.random())
                replicas.start(number)
                replicas.wait_for(number, 1)
            replicas.join()
        finally:
            replicas.end()
        return Run.of(folder, replicas.killed)


def require(is_so: bool, otherwise: str) -> None:
    """End with an error unless something is so."""
    if not is_so:
        raise RuntimeError(otherwise)


def one_process(kind: str, workers: int) -> dict[str, torch.Tensor]:
    """Return what one process trains."""
    network, optimizer = example.make_model()
    loader = patch_dataloader_to_ddp(example.make_loader(kind, workers), rank=0, num_replicas=1, seed=7)
    for _ in range(example.EPOCHS):
        for x, y, _ in loader:
            optimizer.zero_grad()
            (network(x) - y).square().mean().backward()
            optimizer.step()
    return network.state_dict()


def judge(run: Run, kind: str, workers: int, options: Mapping[str, Any]) -> None:
    """Fail unless each sample of each epoch came once, and the parameters are those of one process or alike."""
    counted = run.counted()
    wanted_counts = {epoch: Counter(range(example.SAMPLES)) for epoch in range(example.EPOCHS)}
    require(counted == wanted_counts, "a sample of an epoch did not come exactly once in the committed steps")
    wanted = one_process(kind, workers) if options else run.networks[0]
    for network in run.networks:
        for name, parameter in network.items():
            torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=1e-9)


def main() -> None:
    """Run all schedules, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=5)
    schedules = range(parser.parse_args().schedules)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that all replicas are ended, too
    processes.set_forkserver_preload(["torchft_replicas", "torchft.data", "torch._dynamo"])
    rows: list[list[str]] = [
        ["loader", "batches", "kills", "s from kill to commit", "steps done again", "lost", "repeated"]
    ]
    for kind, workers, options in [*KINDS, (TORCHFTS, 0, {})]:
        runs = []
        for schedule in schedules:
            began = time.monotonic()
            runs.append(run := train(schedule, kind, workers, options))
            if kind != TORCHFTS:
                judge(run, kind, workers, options)
            took_s = time.monotonic() - began
            print(f"{kind}, {workers} workers, {options or '-'}, schedule {schedule}: {took_s:.0f} s", flush=True)
        rows.append(row_of(kind, workers, options, runs))
    if len(schedules) == 5:
        show_and_put(PAGE, "torchft", rows, f"{REPLICAS} replicas, {example.SAMPLES} samples, {example.EPOCHS} epochs")


def row_of(kind: str, workers: int, options: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    """Return a row of the table."""
    stops = sorted(chain.from_iterable(run.stops_s for run in runs))
    lost = repeated = 0
    for run in runs:
        times = sum(run.counted().values(), Counter())
        lost += sum(max(0, example.EPOCHS - times[sample]) for sample in range(example.SAMPLES))
        repeated += sum(max(0, times[sample] - example.EPOCHS) for sample in range(example.SAMPLES))
    of = len(runs) * example.EPOCHS * example.SAMPLES
    return [
        f"{kind}, {workers} workers" if kind != TORCHFTS else kind,
        SHARED if options else OURS,
        str(len(stops)),
        f"{stops[len(stops) // 2]:.1f} (at most {stops[-1]:.1f})",
        str(sum(run.steps_again for run in runs)),
        f"{lost} of {of}",
        str(repeated),
    ]


if __name__ == "__main__":
    main()
