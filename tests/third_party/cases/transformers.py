"""The samplers of Hugging Face's Trainer."""

from transformers.trainer_pt_utils import DistributedLengthGroupedSampler, LengthGroupedSampler

from third_party.base import Case, Fate, N, World, drawn_by

LENGTHS = [index * 7 % N + 1 for index in range(N)]


def distributed(world: World) -> DistributedLengthGroupedSampler:
    return DistributedLengthGroupedSampler(4, num_replicas=world.size, rank=world.rank, lengths=LENGTHS)


CASES = [
    Case("transformers", "`LengthGroupedSampler`", lambda world: drawn_by(LengthGroupedSampler(4, lengths=LENGTHS))),
    Case(
        "transformers", "`DistributedLengthGroupedSampler`", lambda world: drawn_by(distributed(world)), Fate.AS_IT_IS
    ),
]
