"""The errors and warnings of ddp_patch.

::

    Exception
    └── DDPPatchError                    every error of this package
        ├── InvalidOptionError           also a ValueError: an option has no such value
        ├── UnsupportedLoaderError       also a TypeError: the loader cannot be sharded correctly
        ├── NotALoaderError              also a TypeError: something other than a DataLoader was given
        ├── WorldError                   also a RuntimeError: it is unclear which rank of how many this is
        │   └── MissingRanksError        a rank did not come to where all must agree
        ├── RankMismatchError            also a RuntimeError: the ranks' loaders, options or epochs differ
        ├── LeaderError                  also a RuntimeError: rank 0 could not draw what the others wait for
        ├── AlreadyPatchedError          also a RuntimeError: the loader is sharded for another world
        ├── AuditError                   also an AssertionError: an audit found problems
        ├── NoStepsError                 also a ValueError: a rank would make no step in an epoch
        ├── NotPatchedError              also an AssertionError: the guard found unsharded loaders
        ├── ExhaustedSamplerError        also a RuntimeError: the sampler is an iterator with nothing left
        ├── SamplerError                 also a ValueError: a sampler of ddp_patch.samplers got what it cannot use
        ├── StateError                   also a ValueError: a state cannot be saved or restored
        ├── OutputsError                 also a ValueError: the outputs are not those of one whole pass
        ├── StreamLengthError            also a RuntimeError: a sampler gave another number of items than its len()
        ├── RanksFailedError             also a RuntimeError: a rank of ``run_ranks`` did not return
        └── TorchVersionError            also an ImportError: this torch lacks what something needs
    Warning
    └── UserWarning
        ├── AssumedShardedWarning        a map-style dataset holds the numbers of one rank of several
        ├── LeaderWarning                ranks would draw different orders, so rank 0 draws for all
        ├── NotDistributedWarning        there is one process, so the loader is unchanged
        ├── StreamLengthWarning          a sampler gave another number of items than its len()
        └── StreamOrderWarning           whether the ranks read in one order cannot be told
"""

__all__ = [
    "AlreadyPatchedError",
    "AssumedShardedWarning",
    "AuditError",
    "DDPPatchError",
    "ExhaustedSamplerError",
    "InvalidOptionError",
    "LeaderError",
    "LeaderWarning",
    "MissingRanksError",
    "NoStepsError",
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
    "StreamOrderWarning",
    "TorchVersionError",
    "UnsupportedLoaderError",
    "WorldError",
]


class DDPPatchError(Exception):
    """The base class of every error that ddp_patch raises."""


class InvalidOptionError(DDPPatchError, ValueError):
    """An option has a value that does not exist, or two options exclude each other."""


class NotALoaderError(DDPPatchError, TypeError):
    """Something other than a ``torch.utils.data.DataLoader`` was given."""


class UnsupportedLoaderError(DDPPatchError, TypeError):
    """The loader is of a kind that cannot be sharded correctly, so it is not sharded at all."""


class NoStepsError(DDPPatchError, ValueError):
    """A rank would make no step in an epoch in which one process makes some, so data would be lost in silence."""


class WorldError(DDPPatchError, RuntimeError):
    """It is unclear which rank of how many this process is."""


class MissingRanksError(WorldError):
    """A rank did not come in time to where all ranks must agree."""


class RankMismatchError(DDPPatchError, RuntimeError):
    """The ranks' loaders, options, epochs or orders differ."""


class LeaderError(DDPPatchError, RuntimeError):
    """Rank 0 could not draw the stream that the other ranks wait for."""


class AlreadyPatchedError(DDPPatchError, RuntimeError):
    """The loader is already sharded, for another world than the one asked for."""


class NotPatchedError(DDPPatchError, AssertionError):
    """The guard found loaders that would give every rank the same data."""


class AuditError(DDPPatchError, AssertionError):
    """An audit found that ranks would not get their correct shares."""


class SamplerError(DDPPatchError, ValueError):
    """A sampler of ``ddp_patch.samplers`` got arguments that it cannot draw from, or a state that is not its own."""


class StateError(DDPPatchError, ValueError):
    """A loader's state cannot be saved, or a saved one is damaged, too new or of another loader."""


class OutputsError(DDPPatchError, ValueError):
    """The ranks' outputs are not those of one whole pass over the loader."""


class StreamLengthError(DDPPatchError, RuntimeError):
    """A sampler gave another number of items than its ``__len__`` says, and the shares were computed from that."""


class RanksFailedError(DDPPatchError, RuntimeError):
    """A rank of ``run_ranks`` raised, died or did not end in time."""


class ExhaustedSamplerError(DDPPatchError, RuntimeError):
    """The sampler is an iterator, which gives its items once, and a later epoch found none left."""


class TorchVersionError(DDPPatchError, ImportError):
    """The installed torch lacks a private name that something needs."""


class AssumedShardedWarning(UserWarning):
    """A map-style dataset counts as sharded only because it holds the numbers of one rank of several."""


class StreamLengthWarning(UserWarning):
    """A sampler gave another number of items than its ``__len__`` says; all of them were shared."""


class StreamOrderWarning(UserWarning):
    """The ranks read other items of an iterable dataset, and whether only augmentation differs cannot be told."""


class LeaderWarning(UserWarning):
    """The ranks would draw different orders, so rank 0 draws for all."""


class NotDistributedWarning(UserWarning):
    """There is only one process, so the loader came back as it was."""
