"""How wrappers forward attributes: an attribute that is not the wrapper's own is the wrapped object's."""

from collections.abc import Iterator
from typing import Any, ClassVar

from ddp_patch.errors import InvalidOptionError


class AttributeProxy:
    """Base of a wrapper, whose own attributes are its class's, and the attributes that it has when it is sealed.

    A subclass of the user's is never sealed, so it may set attributes of its own at any time.
    """

    # By which attribute users know the wrapped object, which attribute keeps it, and names that are not handed on.
    _inner: ClassVar[str]
    _kept_as: ClassVar[str]
    _hidden: ClassVar[frozenset[str]] = frozenset()
    _is_sealed: bool = False

    def _seal(self) -> None:
        """From now on, set attributes that are not the wrapper's own on the wrapped object."""
        if type(self).__module__.partition(".")[0] == __name__.partition(".")[0]:
            self._is_sealed = True

    def _wrapped(self) -> Iterator[Any]:
        """Yield the wrapped objects that may have an attribute, from the outside in."""
        yield self.__dict__[self._kept_as]

    def _holder(self, name: str) -> Any:
        """Return the wrapped object that has an attribute; the innermost if none has it yet."""
        *before, last = self._wrapped()
        return next((one for one in before if hasattr(one, name)), last)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for names that the wrapper lacks; while the wrapper is unpickled, it lacks all.
        if name.startswith("__") or name in self._hidden or self._kept_as not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._holder(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_sealed or self._is_own(name):
            super().__setattr__(name, value)
        else:
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute of a wrapped object."""
        setattr(self._holder(name), name, value)

    def _is_own(self, name: str) -> bool:
        """Return whether an attribute is the wrapper's own; refuse to set an attribute that follows from the share."""
        if name.startswith("__") or (name in self.__dict__ and name != self._inner):
            return True
        own = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
        inmost = [*self._wrapped()][-1]
        # A method of the wrapper hides the sampler's attribute of the same name.
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
