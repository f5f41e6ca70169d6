"""Wrappers that are transparent: what is not theirs is read from, and set on, what they wrap."""

from typing import Any, ClassVar

from ddp_patch.errors import InvalidOptionError

__all__ = ["Transparent"]


class Transparent:
    """Base of a wrapper; its own are the attributes of its class, and those that it has when it is sealed.

    Subclasses of the user's may set attributes of their own at any time: these are never sealed.
    """

    # The attribute that holds what is wrapped, and the names that are not handed on.
    _inner: ClassVar[str]
    _hidden: ClassVar[frozenset[str]] = frozenset()
    _is_sealed: bool = False

    def _seal(self) -> None:
        """Set on what is wrapped, from now on, whatever is not the wrapper's."""
        if type(self).__module__.partition(".")[0] == __name__.partition(".")[0]:
            self._is_sealed = True

    def _note_set(self, name: str) -> None:
        """Take note that the user set an attribute of what is wrapped."""

    def __getattr__(self, name: str) -> Any:
        # Only called for names that the wrapper lacks: all of them, while it is unpickled.
        if name.startswith("__") or name in self._hidden or self._inner not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__[self._inner], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_sealed or self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__[self._inner], name, value)
            self._note_set(name)

    def __delattr__(self, name: str) -> None:
        if not self._is_sealed or self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.__dict__[self._inner], name)

    def _is_own(self, name: str) -> bool:
        """Return whether an attribute is the wrapper's; refuse one that it computes."""
        own = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
        if isinstance(own, property) and own.fset is None:
            raise InvalidOptionError(
                f"{name} of a {type(self).__name__} cannot be set: it follows from how the data are shared. The "
                f"{type(self.__dict__[self._inner]).__name__} that is wrapped is its attribute {self._inner!r}. Set it "
                "there, if that has it, or build the loader anew and patch that."
            )
        return own is not None or name in self.__dict__ or name.startswith("__")
