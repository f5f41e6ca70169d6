"""The errors and warnings of ddp_patch.

``docs/errors.md`` has a section for each error and warning: its meaning, an example, its usual causes and what to do.
The text of an error ends with the command that shows its section.

::

    Exception
    └── DDPPatchError                    every error of this package
        ├── InvalidOptionError           also a ValueError: an option does not exist or does not fit
        ├── UnsupportedLoaderError       also a TypeError: the loader cannot be sharded correctly
        ├── NotALoaderError              also a TypeError: an object is not a DataLoader
        ├── WorldError                   also a RuntimeError: this process's rank, or the number of ranks, is unclear
        │   └── MissingRanksError        a rank did not arrive in time, or is gone
        ├── RankMismatchError            also a RuntimeError: the ranks' loaders, options, passes or data differ
        ├── AlreadyPatchedError          also a RuntimeError: the loader is sharded for another world
        ├── AuditError                   also an AssertionError: an audit found problems
        ├── NoStepsError                 also a ValueError: a rank would make no step in an epoch
        ├── NotPatchedError              also an AssertionError: a loader is not sharded
        ├── ExhaustedSamplerError        also a RuntimeError: the sampler is an iterator with nothing left
        ├── SamplerError                 also a ValueError: a sampler of ddp_patch.samplers cannot use its arguments
        ├── StateError                   also a ValueError: a state cannot be saved or restored
        ├── OutputsError                 also a ValueError: the outputs do not fit the loader
        ├── StreamLengthError            also a RuntimeError: a pass ended elsewhere than it should
        ├── RanksFailedError             also a RuntimeError: a rank of ``run_ranks`` did not return
        └── TorchVersionError            also an ImportError: the installed torch lacks something
    UserWarning
    └── DDPPatchWarning                  every warning of this package
        ├── AssumedShardedWarning        a map-style dataset with a rank in it counts as sharded
        ├── CannotResumeWarning          a checkpoint is saved without a loader's position
        ├── NotDistributedWarning        there is one process, so the loader is unchanged
        ├── PartsWarning                 parts of the data have samples in common, or the same order in every epoch
        ├── PartialPassWarning           other ranks have not begun a pass that this rank has finished
        ├── RankMismatchWarning          the ranks' data differ, perhaps harmlessly
        ├── StreamLengthWarning          a len() is wrong: a sampler's, or a loader's after the patch
        ├── StreamOrderWarning           the ranks cannot compare in which order they read
        └── UnpatchedLoaderWarning       a loader is iterated in place of its patched copy
"""

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "AlreadyPatchedError",
    "AssumedShardedWarning",
    "AuditError",
    "CannotResumeWarning",
    "DDPPatchError",
    "DDPPatchWarning",
    "ExhaustedSamplerError",
    "InvalidOptionError",
    "MissingRanksError",
    "NoStepsError",
    "NotALoaderError",
    "NotDistributedWarning",
    "NotPatchedError",
    "OutputsError",
    "PartialPassWarning",
    "PartsWarning",
    "RankMismatchError",
    "RankMismatchWarning",
    "RanksFailedError",
    "SamplerError",
    "StateError",
    "StreamLengthError",
    "StreamLengthWarning",
    "StreamOrderWarning",
    "TorchVersionError",
    "UnpatchedLoaderWarning",
    "UnsupportedLoaderError",
    "WorldError",
    "explain",
    "message_of",
]


class _HasSection:
    """A base class that ends an error's text with the command that shows the error's section of ``docs/errors.md``.

    ``__str__`` adds the line, so a pickled error has the bare message. torch builds a worker's error anew from its
    shown text, which has the line already.
    """

    def __str__(self) -> str:
        shown, line = super().__str__(), self._section()
        if shown.rstrip().endswith(line):
            return shown
        return f"{shown}\n{line}" if shown else line

    @classmethod
    def _section(cls) -> str:
        """Return the line with the command; a subclass in another module has its parent's section."""
        name = next(parent.__name__ for parent in cls.__mro__ if parent.__module__ == __name__)
        return f"Causes and remedies: python -m ddp_patch explain {name}"


def message_of(error: BaseException) -> str:
    """Return an error's text without the line that names the command, to quote the text in another one.

    >>> message_of(WorldError("Two ranks say that they are rank 1.")), message_of(KeyError("a"))
    ('Two ranks say that they are rank 1.', "'a'")
    """
    shown = str(error)
    if isinstance(error, _HasSection):
        return shown.rstrip().removesuffix(error._section()).rstrip()
    return shown


def explain(names: Sequence[str]) -> None:
    """Print the section of ``docs/errors.md`` about one error or warning.

    Args:
        names: The arguments of ``ddp-patch explain``: the name of one error or warning. Other arguments exit with 2.
    """
    package = Path(__file__).parent
    # A wheel has the page in the package, a checkout in docs/.
    page = next(path for path in (package / "errors.md", package.parent / "docs" / "errors.md") if path.exists())
    _, *sections = re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_name = {section.partition("\n")[0]: re.split(r"^## ", section, flags=re.MULTILINE)[0] for section in sections}
    if {*names} & {"-h", "--help"}:
        sys.stdout.write(
            "Usage: ddp-patch explain NAME\n\nShow causes and remedies of an error or warning, by its name: "
            f"{', '.join(by_name)}.\n"
        )
        return
    if len(names) != 1 or names[0] not in by_name:
        sys.stderr.write(
            f"ddp-patch explain was given {' '.join(names) or 'nothing'}, and explains one error or warning: "
            f"{', '.join(by_name)}.\n"
        )
        sys.exit(2)
    sys.stdout.write(_plain(by_name[names[0]]))


def _plain(section: str) -> str:
    """Return a section as plain text: code is indented, and a row of a table becomes a point of a list."""
    parts = re.split(r"^```\w*\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)  # prose and code in turn
    parts[1::2] = [textwrap.indent(code.rstrip(), "    ") for code in parts[1::2]]
    for place, prose in enumerate(parts[::2]):
        prose = re.sub(r"<!-- .*? -->|^\| cause \| what to do \|\n\| --- \| --- \|\n", "", prose, flags=re.MULTILINE)
        prose = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", prose).replace("`", "").replace("\\_", "_")
        parts[2 * place] = re.sub(r"^\| (.*) \| (.*) \|$", r"* \1\n  -> \2", prose, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip() + "\n"


class DDPPatchError(_HasSection, Exception):
    """The base class of every error that ddp_patch raises.

    >>> print(DDPPatchError("This happened. Do that."))
    This happened. Do that.
    Causes and remedies: python -m ddp_patch explain DDPPatchError
    """


class InvalidOptionError(DDPPatchError, ValueError):
    """An option has a value that it does not take, or two options exclude each other."""


class NotALoaderError(DDPPatchError, TypeError):
    """An object is not a ``torch.utils.data.DataLoader``, where a loader is needed."""


class UnsupportedLoaderError(DDPPatchError, TypeError):
    """The loader cannot be sharded correctly, so it is not sharded at all."""


class NoStepsError(DDPPatchError, ValueError):
    """A rank would make no step in an epoch, so data would be lost silently."""


class WorldError(DDPPatchError, RuntimeError):
    """The rank of this process, or the number of ranks, is unclear."""


class MissingRanksError(WorldError):
    """A rank did not arrive in time, or is gone."""


class RankMismatchError(DDPPatchError, RuntimeError):
    """The ranks' loaders, options, passes or data differ."""


class AlreadyPatchedError(DDPPatchError, RuntimeError):
    """The loader is already sharded, for another rank or number of ranks."""


class NotPatchedError(DDPPatchError, AssertionError):
    """A loader is not sharded, so it would give every rank the same data."""


class AuditError(DDPPatchError, AssertionError):
    """An audit found that ranks would not get the right samples."""


class SamplerError(DDPPatchError, ValueError):
    """A sampler of ``ddp_patch.samplers`` cannot use its arguments, or the sampler that it wraps."""


class StateError(DDPPatchError, ValueError):
    """A loader's state cannot be saved, or a saved state is damaged, too new or of another loader; or a pass failed."""


class OutputsError(DDPPatchError, ValueError):
    """The outputs that the ranks gather do not fit one whole pass over the loader."""


class StreamLengthError(DDPPatchError, RuntimeError):
    """A sampler yielded more or fewer items than it should, or a dataset ended a pass by StopIteration."""


class RanksFailedError(DDPPatchError, RuntimeError):
    """A rank of ``run_ranks`` raised an error, died or did not end in time."""


class ExhaustedSamplerError(DDPPatchError, RuntimeError):
    """The sampler is an iterator, which yields its items only once, so a later epoch has none."""


class TorchVersionError(DDPPatchError, ImportError):
    """The installed torch lacks something that is needed here."""


class DDPPatchWarning(_HasSection, UserWarning):
    """The base class of every warning that ddp_patch gives."""


class AssumedShardedWarning(DDPPatchWarning):
    """A map-style dataset counts as sharded only because it stores a rank and a number of ranks."""


class CannotResumeWarning(DDPPatchWarning):
    """A checkpoint is saved without a loader's position, so the loader cannot resume from it."""


class StreamLengthWarning(DDPPatchWarning):
    """The ``__len__`` of a sampler or loader is wrong; or a loader that was sharded already has unequal steps."""


class StreamOrderWarning(DDPPatchWarning):
    """The items of an iterable dataset cannot be identified, so the ranks cannot compare the order of reading."""


class RankMismatchWarning(DDPPatchWarning):
    """The ranks' data or items differ in a way that may be harmless, or may mean that samples are lost."""


class UnpatchedLoaderWarning(DDPPatchWarning):
    """A loader is iterated in place of its patched copy, so this rank gets all of its data."""


class PartsWarning(DDPPatchWarning):
    """The ranks' parts of the data have samples in common, or the same order in every epoch."""


class PartialPassWarning(DDPPatchWarning):
    """Other ranks have not begun a pass that this rank has finished, so the program saw only a part of the data."""


class NotDistributedWarning(DDPPatchWarning):
    """There is only one process, so the loader is returned unchanged."""
