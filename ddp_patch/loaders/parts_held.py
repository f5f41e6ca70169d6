"""The lists of files and of numbers in an iterable dataset, which show the part of the data that it reads."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from torch.utils.data import Dataset

from ddp_patch.compat.private_packages import is_hugging_face_stage
from ddp_patch.loaders.columns import attributes, elements_at, last_parts, plain_data, spread
from ddp_patch.walks import LOOKED_AT, held, walk

# How many elements are compared, evenly spread.
_MOST: Final = 16
# Attributes whose names have one of these words may differ between ranks.
_OWN: Final = ("seed", "rank", "device", "cache")
# The names that tempfile gives files and folders of one process, and the query of a URL, which may be a signature.
_OF_ONE_PROCESS: Final = re.compile(r"\btmp[a-z0-9_]{8}\b|(?<=.)\?.*")


def held_by(dataset: Any) -> dict[str, list[Any]]:
    """Return the lists of texts and of whole numbers, such as files, in a dataset and the objects that it wraps.

    The result has each list's length, and then a few elements. Variables in the closures of functions count, too. The
    lists of two ranks differ if each rank built its dataset for a part of the data. Single values, such as an id, a
    date or a folder, may rightly differ, and so may seeds, ranks, devices and caches. Names that ``tempfile`` makes,
    and the part of a URL after ``?``, don't count.

    Examples:
        >>> class Part(torch.utils.data.Dataset):
        ...     def __init__(self, files):
        ...         self.files, self.made_by = files, id(self)
        >>> held_by(Part(["data/0.tar", "data/1.tar"]))
        {'Part.files': [2, '0.tar', '1.tar']}
    """
    found: dict[str, list[Any]] = {}
    seen = set[int]()
    for part in islice(walk(dataset, partial(held, is_wanted=_is_of_stream)), LOOKED_AT):
        for name, value in attributes(part, closures=True):
            is_own = any(word in name.lower().rpartition(".")[2] for word in _OWN)
            if is_own or id(value) in seen or (values := plain_data(value)) is None:
                continue
            seen.add(id(value))
            elements = _named(elements_at(values, spread(len(values), _MOST)))
            if elements or not len(values):
                like = sum(known.partition(" (")[0] == name for known in found)
                found[f"{name} (number {like + 1})" if like else name] = [len(values), *elements]
    return found


def _is_of_stream(part: object) -> bool:
    return isinstance(part, Dataset) or is_hugging_face_stage(part)


def _named(elements: Sequence[Any]) -> list[str | int]:
    """Return elements for errors, if they are numbers or texts; of paths, as few parts as tell them apart.

    Return nothing for other elements.
    """
    if {*map(type, elements)} == {int}:
        return list(elements)
    if not all(isinstance(element, str | os.PathLike) for element in elements):
        return []
    paths = [_OF_ONE_PROCESS.sub("", os.fspath(element)) for element in elements]
    tried = [[last_parts(path, length) for path in paths] for length in (1, 2, 3)]
    return list(next((names for names in tried if len({*names}) == len(names)), tried[0]))


def first_differing(of_ranks: Mapping[int, Mapping[str, Sequence[Any]]]) -> dict[int, dict[str, object]]:
    """Return each rank's values in the first list that differs, of the lists that ``held_by`` found on every rank.

    Examples:
        >>> first_differing({0: {"Part.files": [2, "0.tar", "1.tar"]}, 1: {"Part.files": [2, "0.tar", "3.tar"]}})
        {0: {'Part.files[1]': '1.tar'}, 1: {'Part.files[1]': '3.tar'}}
    """
    for name in next(iter(of_ranks.values())):
        told = [lists[name] for lists in of_ranks.values() if name in lists]
        if len(told) < len(of_ranks) or all(one == told[0] for one in told):
            continue
        columns = [*zip(*told, strict=False)]
        place = next((place for place, column in enumerate(columns) if place and len({*column}) > 1), None)
        names = {} if len({*columns[0]}) == 1 else {0: f"len({name})"}
        if place is not None:
            names[place] = f"{name}[{spread(min(columns[0]), _MOST)[place - 1]}]"
        return {rank: {names[at]: one[at] for at in names} for rank, one in zip(of_ranks, told, strict=True)}
    return {rank: {} for rank in of_ranks}
