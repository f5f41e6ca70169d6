"""Samplers of other packages."""

from typing import Final

from ddp_patch.compat.names import full_name

__all__ = ["arranges_neighbours"]

# They give single indices, and make those of a batch as a group: a few samples of each class, a triplet, a prompt
# again and again. A rank that took every num_replicas-th index would get parts of groups. No sampler bears a mark of
# this, so they are known by name. Samplers that sort by length or only balance an epoch's classes are not among them:
# their neighbours may go to different ranks.
_ARRANGE_NEIGHBOURS: Final = {
    # pytorch-metric-learning, seen in 2.9.0
    "pytorch_metric_learning.samplers.fixed_set_of_triplets.FixedSetOfTriplets",
    "pytorch_metric_learning.samplers.m_per_class_sampler.MPerClassSampler",
    # trl, seen in 1.16.0; the others in 0.17
    "trl.trainer.utils.RepeatSampler",
    "trl.trainer.grpo_trainer.RepeatRandomSampler",
    "trl.trainer.grpo_trainer.RepeatSampler",
    # open-metric-learning's flattened batches, read in its repository of 2022; later editions have batch samplers alone
    "oml.samplers.balanced.SequentialBalanceSampler",
    "oml.samplers.balanced.SequentialCategoryBalanceSampler",
    # torchreid, read in its repository
    "torchreid.data.sampler.RandomIdentitySampler",
}


def arranges_neighbours(sampler: object) -> bool:
    """Return whether a sampler of single indices makes those of a batch as a group, so that batches must stay whole."""
    return not _ARRANGE_NEIGHBOURS.isdisjoint(map(full_name, type(sampler).__mro__))
