"""Where an attribute goes that is read from a wrapper, or set on it: to what it wraps, unless it is the wrapper's."""

from collections.abc import Iterator
from typing import Any, ClassVar

from ddp_patch.errors import InvalidOptionError

__all__ = ["AttributeProxy"]


class AttributeProxy:
    """Base of a wrapper; its own are the attributes of its class, and those that it has when it is sealed.

    Subclasses of the user's may set attributes of their own at any time: these are never sealed.
    """

    # What is wrapped by the name that users know, where it is kept, and the names that are not handed on.
    _inner: ClassVar[str]
    _kept_as: ClassVar[str]
    _hidden: ClassVar[frozenset[str]] = frozenset()
    _is_sealed: bool = False

    def _seal(self) -> None:
        """Set on what is wrapped, from now on, whatever is not the wrapper's."""
        if type(self).__module__.partition(".")[0] == __name__.partition(".")[0]:
            self._is_sealed = True

    def _wrapped(self) -> Iterator[Any]:
        """Yield what may have an attribute that the wrapper lacks, from the outside in."""
        yield self.__dict__[self._kept_as]

    def _holder(self, name: str) -> Any:
        """Return which of what is wrapped has an attribute; the innermost if none has it yet."""
        *before, last = self._wrapped()
        return next((one for one in before if hasattr(one, name)), last)

    def __getattr__(self, name: str) -> Any:
        # Only called for names that the wrapper lacks: all of them, while it is unpickled.
        if name.startswith("__") or name in self._hidden or self._kept_as not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._holder(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_sealed or self._is_own(name):
            super().__setattr__(name, value)
        else:
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute of what is wrapped."""
        setattr(self._holder(name), name, value)

    def _is_own(self, name: str) -> bool:
        """Return whether an attribute is the wrapper's; refuse one that follows from the share."""
        if name.startswith("__") or (name in self.__dict__ and name != self._inner):
            return True
        own = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
        inmost = [*self._wrapped()][-1]
        # Nobody reaches a sampler's attribute that is called as a method of the wrapper.
        is_fixed = own.fset is None if isinstance(own, property) else own is not None and hasattr(inmost, name)
        if is_fixed or name == self._inner:
            wrapped = type(inmost).__name__
            place = f"its attribute {self._inner!r}" if getattr(self, self._inner) is inmost else "the one you gave it"
            raise InvalidOptionError(
                f"{name} of a {type(self).__name__} cannot be set: the ranks have agreed on what is shared, and how. "
                f"The {wrapped} that is wrapped is {place}. Set attributes there, or build the loader anew and patch "
                "that."
            )
        return own is not None
