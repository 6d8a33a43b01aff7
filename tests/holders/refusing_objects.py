"""Objects that raise or lie when they are accessed.

They have a module of their own, because pytest inspects every object in a test module.
"""

from typing import Any


class Refusing:
    """Raises on every access."""

    def __init__(self, x: Any) -> None:
        object.__setattr__(self, "x", x)

    def _refuse(self, *_: Any) -> Any:
        raise SystemExit("accessed")

    __class__ = property(_refuse)  # type: ignore[assignment]
    __eq__ = __hash__ = __repr__ = __str__ = __len__ = __bool__ = __iter__ = _refuse
    __getattribute__ = __getattr__ = __dir__ = __contains__ = __getitem__ = _refuse


class RefusingType(type):
    """A metaclass that raises on every access to its classes."""

    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(f"accessed {name}")

    def __instancecheck__(cls, instance: Any) -> bool:
        raise SystemExit("accessed by a check")

    __subclasscheck__ = __instancecheck__


class LyingDict(dict[str, Any]):
    def keys(self) -> Any:
        raise SystemExit("accessed keys")

    items = values = __iter__ = __len__ = __getitem__ = __contains__ = keys


class LyingList(list[Any]):
    def __iter__(self) -> Any:
        raise SystemExit("accessed items")

    __len__ = __getitem__ = __contains__ = __iter__  # type: ignore[assignment]


class PosingAsDict:
    """Has dict as its ``__class__``."""

    def __init__(self, x: Any) -> None:
        self.x = x

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return dict


class CountingReads:
    """Counts how often its properties are read."""

    reads = 0

    def __init__(self, x: Any) -> None:
        self._x = x

    @property
    def x(self) -> Any:
        type(self).reads += 1
        return self._x

    @property
    def gi_frame(self) -> Any:
        type(self).reads += 1
        return None

    grad_fn = next_functions = base = __dict__ = gi_frame  # type: ignore[assignment]


def of_refusing_type(x: Any) -> Any:
    """Return an object whose class raises on every access too."""

    class OfRefusingType(metaclass=RefusingType):
        __slots__ = ("x",)

    instance = object.__new__(OfRefusingType)
    type.__dict__["__dict__"].__get__(OfRefusingType)["x"].__set__(instance, x)
    return instance
