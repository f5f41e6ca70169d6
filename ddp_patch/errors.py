"""Everything that ddp_patch raises or warns of.

::

    Exception
    └── DDPPatchError                    every error of this package
        ├── InvalidOptionError           also a ValueError: an option that means nothing
        ├── UnsupportedLoaderError       also a TypeError: a loader that cannot be sharded correctly
        ├── NotALoaderError              also a TypeError: something that is no DataLoader
        ├── WorldError                   also a RuntimeError: which rank of how many is unclear
        │   └── MissingRanksError        not every rank came to where all must agree
        ├── RankMismatchError            also a RuntimeError: the ranks' loaders, options or epochs differ
        ├── LeaderError                  also a RuntimeError: rank 0 could not draw what it was to send
        ├── AlreadyPatchedError          also a RuntimeError: sharded already, for another world
        ├── AuditError                   also an AssertionError: an audit found problems
        ├── NotPatchedError              also an AssertionError: the guard found unsharded loaders
        ├── ExhaustedSamplerError        also a RuntimeError: an iterator was given as sampler and has nothing left
        ├── SamplerError                 also a ValueError: a sampler of ddp_patch.samplers was asked for what cannot be
        ├── StateError                   also a ValueError: a saved state that cannot be told or restored
        ├── OutputsError                 also a ValueError: outputs that are not those of one pass over the loader
        ├── StreamLengthError            also a RuntimeError: a sampler gave another number of items than it said
        └── RanksFailedError             also a RuntimeError: ``run_ranks`` did not get every rank's result
    Warning
    └── UserWarning
        ├── LeaderWarning                ranks would draw different orders, so rank 0 draws for all
        ├── NotDistributedWarning        there is one process, so nothing was changed
        └── StreamLengthWarning          a sampler gave another number of items than its len() said
"""

__all__ = [
    "AlreadyPatchedError",
    "AuditError",
    "DDPPatchError",
    "ExhaustedSamplerError",
    "InvalidOptionError",
    "LeaderError",
    "LeaderWarning",
    "MissingRanksError",
    "NotALoaderError",
    "NotDistributedWarning",
    "NotPatchedError",
    "OutputsError",
    "RankMismatchError",
    "RanksFailedError",
    "SamplerError",
    "StateError",
    "StreamLengthError",
    "StreamLengthWarning",
    "UnsupportedLoaderError",
    "WorldError",
]


class DDPPatchError(Exception):
    """Base class of every error that ddp_patch raises."""


class InvalidOptionError(DDPPatchError, ValueError):
    """An option has a value that means nothing, or two options exclude each other."""


class NotALoaderError(DDPPatchError, TypeError):
    """A ``torch.utils.data.DataLoader`` was needed and something else was given."""


class UnsupportedLoaderError(DDPPatchError, TypeError):
    """A loader of a kind that cannot be sharded correctly, so it is not sharded at all."""


class WorldError(DDPPatchError, RuntimeError):
    """It cannot be told which rank of how many this process is."""


class MissingRanksError(WorldError):
    """Not every rank came, in time, to where all ranks must agree."""


class RankMismatchError(DDPPatchError, RuntimeError):
    """The ranks' loaders, options, epochs or orders are not the same."""


class LeaderError(DDPPatchError, RuntimeError):
    """Rank 0 could not draw the stream that the other ranks wait for."""


class AlreadyPatchedError(DDPPatchError, RuntimeError):
    """The loader is sharded already, for another world than the one asked for."""


class NotPatchedError(DDPPatchError, AssertionError):
    """The guard found loaders that would give every rank the same data."""


class AuditError(DDPPatchError, AssertionError):
    """An audit found that ranks would not get their correct shares."""


class SamplerError(DDPPatchError, ValueError):
    """A sampler of ``ddp_patch.samplers`` was given what it cannot draw from, or a state that is not its own."""


class StateError(DDPPatchError, ValueError):
    """A loader's state cannot be told, or a saved one is damaged, too new or of another loader."""


class OutputsError(DDPPatchError, ValueError):
    """The outputs that ranks gave are not those of one whole pass over the loader."""


class StreamLengthError(DDPPatchError, RuntimeError):
    """A sampler gave another number of items than its ``__len__`` said, and the shares rest on that number."""


class RanksFailedError(DDPPatchError, RuntimeError):
    """At least one rank of ``run_ranks`` raised, died or did not end in time."""


class ExhaustedSamplerError(DDPPatchError, RuntimeError):
    """The sampler is an iterator, which gives its items once, and an epoch found none left."""


class StreamLengthWarning(UserWarning):
    """A sampler gave another number of items than its ``__len__`` says; all of them were shared."""


class LeaderWarning(UserWarning):
    """The ranks would draw different orders, so rank 0 draws for all."""


class NotDistributedWarning(UserWarning):
    """There is only one process, so the loader came back as it was."""
