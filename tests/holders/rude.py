"""Objects that refuse or lie, in a module of their own: pytest asks what tests import by name."""

from typing import Any


class Rude:
    """Refuses every question."""

    def __init__(self, x: Any) -> None:
        object.__setattr__(self, "x", x)

    def _refuse(self, *_: Any) -> Any:
        raise SystemExit("asked")

    __class__ = property(_refuse)  # type: ignore[assignment]
    __eq__ = __hash__ = __repr__ = __str__ = __len__ = __bool__ = __iter__ = _refuse
    __getattribute__ = __getattr__ = __dir__ = __contains__ = __getitem__ = _refuse


class RudeClass(type):
    """A class of classes that refuse every question."""

    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(f"asked for {name}")

    def __instancecheck__(cls, instance: Any) -> bool:
        raise SystemExit("asked for a check")

    __subclasscheck__ = __instancecheck__


class LyingDict(dict[str, Any]):
    def keys(self) -> Any:
        raise SystemExit("asked for keys")

    items = values = __iter__ = __len__ = __getitem__ = __contains__ = keys


class LyingList(list[Any]):
    def __iter__(self) -> Any:
        raise SystemExit("asked for items")

    __len__ = __getitem__ = __contains__ = __iter__  # type: ignore[assignment]


class Posing:
    """Says that it is a dict."""

    def __init__(self, x: Any) -> None:
        self.x = x

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return dict


class Computing:
    """A property that would change what it is asked of."""

    asked = 0

    def __init__(self, x: Any) -> None:
        self._x = x

    @property
    def x(self) -> Any:
        type(self).asked += 1
        return self._x

    @property
    def gi_frame(self) -> Any:
        type(self).asked += 1
        return None

    grad_fn = next_functions = base = __dict__ = gi_frame  # type: ignore[assignment]


def rudest(x: Any) -> Any:
    """An object whose class refuses too."""

    class Rudest(metaclass=RudeClass):
        __slots__ = ("x",)

    rude = object.__new__(Rudest)
    type.__dict__["__dict__"].__get__(Rudest)["x"].__set__(rude, x)
    return rude
