"""Walks through what objects hold."""

from typing import Any

from ddp_patch.walks import LOOKED_AT, first_parts, held, stored, walk


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("empty", "kept")

    def __init__(self) -> None:
        self.kept = 3


class Raising:
    @property
    def asked(self) -> int:
        raise AssertionError("a property was asked")


def test_slots_are_stored_and_no_property_is_asked() -> None:
    assert stored(Slotted()) == {"kept": 3}
    assert stored(Raising()) == {}


def test_only_a_container_that_begins_with_what_is_wanted_is_read() -> None:
    late = [0] * LOOKED_AT + ["late"]
    holder = Holder(alone="alone", listed=[1, "listed"], named={1: "named"}, in_set={"in set"}, late=late, number=2)
    assert [*held(holder, lambda value: isinstance(value, str))] == ["alone", "listed", "named", "in set"]


def test_a_value_has_itself_and_its_first_elements_as_parts() -> None:
    assert first_parts(3) == [3]
    assert first_parts({"a": 1}) == [{"a": 1}, 1]
    assert len(first_parts([0] * 1000)) == 1 + LOOKED_AT


def test_a_walk_visits_each_object_once_and_ends_in_circles() -> None:
    inner = Holder(lacks=None)
    outer = Holder(inner=inner, again=inner)
    inner.outer = outer  # type: ignore[attr-defined]  # a circle
    assert [*walk(outer, lambda found: stored(found).values())] == [outer, inner]
    assert [*walk(None, lambda found: [found])] == []
