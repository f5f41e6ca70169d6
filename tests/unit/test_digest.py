"""The digest of a stream: what it tells, where it is marked, and that it is the same in every process."""

import os
import subprocess
import sys
from typing import Any

import hashed
import pytest
from hashed import KINDS, digest_of

from ddp_patch.orders.digest import END, Digest, mark_counts, next_mark


def test_any_two_neighbours_that_change_places_show_at_the_next_mark() -> None:
    items = list(range(300))
    alike = digest_of(items)
    for place in range(299):
        other = digest_of([*items[:place], items[place + 1], items[place], *items[place + 2 :]])
        for count, value in alike.marks.items():
            assert (other.marks[count] == value) == (0 < count <= place)


def test_a_mark_comes_when_a_quarter_more_came() -> None:
    counts = mark_counts()
    assert [next(counts) for _ in range(12)] == [1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29, 37]
    digest = digest_of(range(37))
    assert [*digest.marks] == [1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29, 37, END]
    reached = 0
    for _ in range(200):
        reached = next_mark(reached)
    assert reached > 10**18


def test_each_kind_of_items_has_a_digest_of_its_own() -> None:
    found = [str(digest_of(items).marks) for items in KINDS.values()]
    assert len(set(found)) == len(found)


def test_every_process_says_the_same_whatever_its_hash_seed() -> None:
    """Of digests, of fingerprints of orders, and of items' names."""
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "import hashed; print(hashed.told())"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert told.stdout.strip() == str(hashed.told())


@pytest.mark.parametrize("items", [list(range(100)), [[at, at + 1] for at in range(100)]])
def test_the_same_parts_have_the_same_digest_and_each_mark_is_of_all_items_before(items: list[Any]) -> None:
    assert digest_of(items, 7, 30).marks == digest_of(items, 7, 30).marks
    changed = [*items[:2], items[3], items[2], *items[4:]]
    different = digest_of(changed, 7, 30).marks
    assert all(
        different[count] != value for count, value in digest_of(items, 7, 30).marks.items() if count > 2 or count < 0
    )


def test_names_are_the_same_on_every_version_of_python() -> None:
    digest = Digest()
    for name in (b"cat.jpg", b"dog.jpg"):
        digest.add_names([name])
    assert digest.marks == {1: 4503124891344858597, 2: -7058520789730333242}
