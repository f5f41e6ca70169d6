"""The kinds of problem that an audit finds: why each kind matters, and what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# By kind of problem: why it matters, and what to do.
SAID: Mapping[str, tuple[str, str]] = {
    "not_sharded": (
        "Gradients average repeated samples, and an epoch costs more than it should or leaves samples out.",
        "Pass the loader through patch_dataloader_to_ddp() on every rank, after init_process_group(). A factory must "
        "take its rank from its arguments: no process group is up here.",
    ),
    "double_sharding": (
        "Each rank gets a share of a share, so most samples are never seen.",
        "Shard once: leave out the sampler wrapper, or the framework's own (use_distributed_sampler=False).",
    ),
    "ranks_disagree": (
        "The order or the data depend on the global random states, which differ between ranks.",
        "Pass the loader through patch_dataloader_to_ddp(), which derives the order from (seed, epoch); or seed every "
        "rank alike where the order is made.",
    ),
    "split_batch": (
        "Batches that the batch sampler made as one (P x K, one length, one shape) reach the ranks in pieces.",
        "Shard whole batches: pass the loader through patch_dataloader_to_ddp(), or wrap the batch sampler in "
        "DDPBatchSamplerWrapper.",
    ),
    "missing": (
        "The missing samples are never trained on, and metrics leave them out.",
        "Pass the loader through patch_dataloader_to_ddp(), and seed alike on every rank what an order is drawn from; "
        "or use a smaller batch_size, uneven='pad' and drop_last=False.",
    ),
    "tail_lost": (
        "They are in the last, incomplete round or batch each time, which is dropped, so no rank ever sees them.",
        "Use uneven='pad' and drop_last=False, or shuffle, so that others are left out in each epoch.",
    ),
    "repeated": (
        "Repeated samples weigh more than others, and an epoch takes longer.",
        "Pass the loader of the whole data through patch_dataloader_to_ddp(), whose shares are disjoint. If several "
        "workers read an iterable dataset, split it by torch.utils.data.get_worker_info(), too.",
    ),
    "foreign": (
        "Ranks train on other data than one process does: another split, another file, or parts made beforehand.",
        "Make every rank's loader from the same data as that of one process, make(0, 1), which gets all of it.",
    ),
    "padding": (
        "Repeated samples count twice in gradients and in every metric of an evaluation.",
        "Use gather_in_order() or uneven='keep' for an evaluation, and no padding up to whole batches (accelerate: "
        "even_batches=False).",
    ),
    "uneven_steps": (
        "Ranks with more steps wait in the all-reduce for the others, and the training hangs or fails there.",
        "Give each rank as many items as the others, as patch_dataloader_to_ddp() with uneven='pad' or 'drop' does.",
    ),
    "same_order": (
        "Every epoch then has the same batches, which a shuffle should prevent.",
        "Call set_epoch(epoch) before each epoch (and pass set_epoch=True here if your training does), or pass the "
        "loader through patch_dataloader_to_ddp() instead of using a distributed sampler. A loader that does not "
        "shuffle needs shuffle=True.",
    ),
    "wrong_length": (
        "Schedules, progress bars and shares that rely on it are wrong.",
        "Correct the sampler's __len__, or leave it out.",
    ),
    "error": (
        "In a training, the other ranks would wait for it; here, nothing is known about the shares.",
        "Mend the sampler, or pass epochs=1 if it is meant for one epoch.",
    ),
}
problem_kinds: Sequence[str] = tuple(SAID)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that an audit has found, and what to do about it.

    Attributes:
        kind: The kind of problem, one of ``problem_kinds``.
        what: What was found, with its numbers.
        where: The epoch and the ranks.
        why: Why the problem matters, and where it comes from.
        remedy: What to do about it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> (problem,) = audit(DataLoader(range(8)), world_size=2, patch=False).problems
        >>> problem.kind, problem.where, problem.what
        ('not_sharded', 'epoch 0, 2 ranks', 'Each of 2 ranks gets all of the data, 8 samples.')
    """

    kind: str
    what: str
    where: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}): {self.what} {self.why} {self.remedy}"
