"""An expression that says what holds a tensor gives that very object when a user types it."""

import enum
import functools
import sys
import weakref
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from searched import Source

from pytest_cka_memory.core.allocations import Allocation, AllocationSite
from pytest_cka_memory.holders.expressions import without_places, without_root
from pytest_cka_memory.holders.survivors import holdings

HELD: list[Any] = []
"""What holds the tensors of all tests: one search describes them, because it walks all objects."""


class Made:
    """The place where a tensor was allocated, another for each, so that none are in one group."""

    def __init__(self, number: int) -> None:
        self._site = AllocationSite((str(number),))

    def readable(self) -> AllocationSite:
        return self._site


class Described(NamedTuple):
    """What a report says about the holder of a tensor."""

    expression: str
    tensor: Any
    """A weak reference."""
    entry: str
    """The expression of what has the tensor, in `HELD`."""


@pytest.fixture(scope="module")
def described() -> Iterator[Callable[[str, Callable[..., Any]], Described]]:
    """Return a function that returns what is said of a kind of attribute and a place in it."""
    cases = [(kind, place) for place in (*PLACES, in_cache) for kind in KINDS]
    cases.remove(("value of a cached_property", in_cache))
    tensors = [_hold(KINDS[kind], place) for kind, place in cases]
    allocations = [
        Allocation(key, 1000, number, Source(), Made(number))
        for number, (_, key) in enumerate(tensors)
    ]
    found = {}
    for holding in holdings(allocations, {}):
        number = int(holding.created_at[0])
        entry = f"{__name__}.HELD[{number}]"
        assert holding.held_by is not None, cases[number]
        text = without_root(holding.held_by)
        found[cases[number]] = Described(text, tensors[number][0], entry)
    assert len(found) == len(cases)
    yield lambda kind, place: found[kind, place]
    HELD.clear()


def _hold(kind: Callable[[Any], Any], place: Callable[..., Any]) -> tuple[Any, int]:
    """Hold a new tensor; return a weak reference to it, and its address.

    No local variable may hold it, because that would be its holder.
    """
    tensor = torch.ones(250)
    HELD.append(kind(place(tensor)))
    return weakref.ref(tensor), tensor.untyped_storage().data_ptr()


def value_of(expression: str) -> Any:
    """Evaluate an expression as a user does who has imported this module."""
    return eval(expression, {__name__: sys.modules[__name__], "torch": torch})


def in_default(tensor: torch.Tensor) -> Callable[..., Any]:
    def function(self: Any, x: int = 0, kept: Any = [tensor]) -> None: ...  # noqa: B006

    return function


def in_keyword_default(tensor: torch.Tensor) -> Callable[..., Any]:
    def function(self: Any, x: int = 0, *, kept: Any = tensor) -> None: ...

    return function


def in_closure(tensor: torch.Tensor) -> Callable[..., Any]:
    def function(self: Any, x: int = 0) -> Any:
        return tensor

    return function


def in_attribute(tensor: torch.Tensor) -> Callable[..., Any]:
    def function(self: Any, x: int = 0) -> None: ...

    function.cache = {"x": tensor}  # type: ignore[attr-defined]
    return function


def in_wrapped(tensor: torch.Tensor) -> Callable[..., Any]:
    inner = in_default(tensor)

    @functools.wraps(inner)
    def function(self: Any, x: int = 0) -> None: ...

    return function


class Descriptor:
    """A user's descriptor: reading it is an error, because that may run any code."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AssertionError("the code of a descriptor ran")


class DataDescriptor(Descriptor):
    def __set__(self, instance: Any, value: Any) -> None: ...


class OwnProperty(property):
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AssertionError("the code of a descriptor ran")


def with_attribute(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a class whose attribute is what `make` makes of a function."""
    return lambda function: type("A", (), {"f": make(function)})


def registered(function: Any) -> Any:
    @functools.singledispatch
    def dispatching(argument: Any) -> None: ...

    dispatching.register(int)(function)
    dispatching.register(torch.Tensor)(function)
    return dispatching


def registered_method(function: Any) -> Any:
    method = functools.singledispatchmethod(lambda self, argument: None)
    method.register(int, function)
    return method


class Meta(type):
    @property
    def f(cls) -> Any:
        raise AssertionError("the code of a property ran")


class Slots:
    __slots__ = ("__private", "f")

    def __init__(self, function: Any) -> None:
        self.f = function


class PrivateSlots(Slots):
    __slots__ = ()

    def __init__(self, function: Any) -> None:
        self._Slots__private = function


class Shadowed:
    """Has an attribute that a property of the same name hides."""

    def __init__(self, function: Any) -> None:
        vars(self)["f"] = function

    @property
    def f(self) -> Any:
        raise AssertionError("the code of a property ran")


def cached(function: Any) -> Any:
    """Return an object whose `functools.cached_property` has returned `function`."""
    cls: Any = type("A", (), {"f": functools.cached_property(lambda self: function)})
    cls.f.__set_name__(cls, "f")
    instance = cls()
    assert instance.f is function
    del cls.f
    return instance


def with_name(name: str) -> Callable[[Any], Any]:
    def make(function: Any) -> Any:
        cls = type("A", (), {})
        setattr(cls, name, function)
        return cls

    return make


def instance_with_name(function: Any) -> Any:
    instance = type("A", (), {})()
    setattr(instance, "two words", function)
    return instance


def holding_descriptor(function: Any) -> Any:
    instance = type("A", (), {})()
    instance.f = staticmethod(function)
    return instance


def abstract_property(function: Any) -> Any:
    return type("A", (ABC,), {"f": property(function)})


def member(function: Any) -> Any:
    return enum.Enum("A", {"f": ("value", (function,))})


KINDS: dict[str, Callable[[Any], Any]] = {
    "function": with_attribute(lambda function: function),
    "staticmethod": with_attribute(staticmethod),
    "staticmethod of a staticmethod": with_attribute(lambda f: staticmethod(staticmethod(f))),
    "classmethod": with_attribute(classmethod),
    "classmethod of a property": with_attribute(lambda f: classmethod(property(f))),  # type: ignore[arg-type]
    "classmethod of a partial": with_attribute(lambda f: classmethod(functools.partial(f, x=1))),
    "property": with_attribute(property),
    "setter": with_attribute(lambda function: property(None, function)),
    "property of an abstract class": abstract_property,
    "subclass of property": with_attribute(OwnProperty),
    "cached_property": with_attribute(functools.cached_property),
    "value of a cached_property": cached,
    "partial": with_attribute(functools.partial),
    "partialmethod": with_attribute(functools.partialmethod),
    "argument of a partialmethod": with_attribute(lambda f: functools.partialmethod(print, f)),
    "keyword of a partialmethod": with_attribute(lambda f: functools.partialmethod(print, end=f)),
    "singledispatch": registered,
    "static singledispatch": with_attribute(lambda f: staticmethod(registered(f))),
    "singledispatchmethod": with_attribute(registered_method),
    "first function of a singledispatchmethod": with_attribute(functools.singledispatchmethod),
    "slot": Slots,
    "private slot": PrivateSlots,
    "descriptor": with_attribute(Descriptor),
    "data descriptor": with_attribute(DataDescriptor),
    "attribute hidden by a property": Shadowed,
    "attribute hidden by a metaclass": lambda function: Meta("A", (), {"f": function}),
    "name that is no identifier": with_name("two words"),
    "name that is a keyword": with_name("class"),
    "name of an instance that is no identifier": instance_with_name,
    "staticmethod of an instance": holding_descriptor,
    "staticmethod in a list": lambda function: [staticmethod(function)],
    "bound method": lambda function: [function.__get__(3)],
    "member of an enum": member,
}
PLACES = [in_default, in_keyword_default, in_closure, in_attribute, in_wrapped]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_expression_gives_the_tensor(
    described: Callable[..., Described], kind: str, place: Callable[..., Any]
) -> None:
    """What a report prints evaluates to the tensor, for functions behind each kind of attribute."""
    expression, tensor, entry = described(kind, place)
    assert entry in expression
    assert tensor() is not None
    assert value_of(expression) is tensor(), expression


def in_cache(tensor: torch.Tensor) -> Any:
    """Return a cached function that has returned `tensor`."""
    cache = functools.lru_cache(lambda values: values[0])

    class Values(list[torch.Tensor]):
        __hash__ = object.__hash__  # type: ignore[assignment]

    values = Values([tensor])
    cache(values)
    values.clear()
    return cache


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "value of a cached_property"])
def test_expression_gives_the_cache(described: Callable[..., Described], kind: str) -> None:
    """Of a ``functools.lru_cache`` the expression gives the function that has the cache."""
    expression, _, entry = described(kind, in_cache)
    assert entry in expression
    found = value_of(expression.removesuffix(".<functools.lru_cache>"))
    assert type(found) is functools._lru_cache_wrapper, expression
    assert found.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("staticmethod", ".f.__defaults__[1][0]"),
        ("classmethod", ".f.__func__.__defaults__[1][0]"),
        ("property", ".f.fget.__defaults__[1][0]"),
        ("partialmethod", '.__dict__["f"].func.__defaults__[1][0]'),
        ("descriptor", '.__dict__["f"].function.__defaults__[1][0]'),
        ("slot", ".f.__defaults__[1][0]"),
    ],
)
def test_expression_is_short(described: Callable[..., Described], kind: str, expected: str) -> None:
    """The dict of a class is written only if its attribute gives something else when it is read."""
    expression, _, entry = described(kind, in_default)
    assert expression == f"{entry}{expected}"


def test_pattern_is_the_same_for_all_entries() -> None:
    """Attributes that are written through the dict of a class are grouped like other entries."""
    assert without_places('net.A.__dict__["f"].args[0]') == without_places(
        'net.A.__dict__["f"].args[1]'
    )
