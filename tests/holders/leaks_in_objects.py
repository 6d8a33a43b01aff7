"""Leaks in plain Python objects: containers, attributes, functions, caches."""

import atexit
import collections
import functools
import logging
import logging.handlers
import queue
import signal
import sys
import types
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from planted import CLEANUP, KEEP, Table, leak

OBJECTS: Table = []
LIST: list[Any] = []
DICT: dict[Any, Any] = {}
SET: set[Any] = set()
DEQUE: collections.deque[Any] = collections.deque()
GROUPS: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
WEAK: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
CACHE = "call cache_clear()"


@leak(OBJECTS, "leaks_in_objects.LIST[0]")
def module_list() -> None:
    LIST.append(torch.ones(250))
    CLEANUP.callback(LIST.clear)


@leak(OBJECTS, "leaks_in_objects.DICT['step 1']")
def module_dict() -> None:
    DICT["step 1"] = torch.ones(250)
    CLEANUP.callback(DICT.clear)


@leak(OBJECTS, "leaks_in_objects.DICT[('train', 3)]")
def dict_with_tuple_keys() -> None:
    DICT["train", 3] = torch.ones(250)
    CLEANUP.callback(DICT.clear)


@leak(OBJECTS, "list(leaks_in_objects.DICT)[0]")
def key_of_a_dict() -> None:
    DICT[torch.ones(250)] = "seen"
    CLEANUP.callback(DICT.clear)


@leak(OBJECTS, "list(leaks_in_objects.SET)[0]")
def module_set() -> None:
    SET.add(torch.ones(250))
    CLEANUP.callback(SET.clear)


@leak(OBJECTS, "leaks_in_objects.DEQUE[0]")
def module_deque() -> None:
    DEQUE.append(torch.ones(250))
    CLEANUP.callback(DEQUE.clear)


@leak(OBJECTS, "leaks_in_objects.GROUPS['fc'][0]")
def module_defaultdict() -> None:
    GROUPS["fc"].append(torch.ones(250))
    CLEANUP.callback(GROUPS.clear)


@leak(OBJECTS, "leaks_in_objects.NewGlobal.cache['x']")
def class_attribute() -> None:
    NewGlobal.cache["x"] = torch.ones(250)
    CLEANUP.callback(NewGlobal.cache.clear)


class NewGlobal:
    cache: dict[str, Any] = {}  # noqa: RUF012 (the leak under test)

    def __init__(self) -> None:
        self.memory: Any = None


@leak(OBJECTS, "planted.KEEP[0].memory")
def attribute() -> None:
    holder = NewGlobal()
    holder.memory = torch.ones(250)
    KEEP.append(holder)


class Slotted:
    __slots__ = ("memory",)


class SlottedChild(Slotted):
    __slots__ = ("__private",)

    def __init__(self, value: object) -> None:
        self.__private = value


@leak(OBJECTS, "planted.KEEP[0].memory")
def slot() -> None:
    holder = Slotted()
    holder.memory = torch.ones(250)  # type: ignore[attr-defined]
    KEEP.append(holder)


@leak(OBJECTS, "planted.KEEP[0]._SlottedChild__private")
def private_slot() -> None:
    KEEP.append(SlottedChild(torch.ones(250)))


@leak(OBJECTS, "planted.KEEP[0]['a'][1][0]['b']")
def nested_containers() -> None:
    KEEP.append({"a": [0, ({"b": torch.ones(250)},)]})


class Pair(NamedTuple):
    name: str
    value: torch.Tensor


@leak(OBJECTS, "planted.KEEP[0].value")
def named_tuple() -> None:
    KEEP.append(Pair("x", torch.ones(250)))


@dataclass
class Row:
    value: torch.Tensor


@leak(OBJECTS, "planted.KEEP[0].value")
def data_class() -> None:
    KEEP.append(Row(torch.ones(250)))


@leak(OBJECTS, "planted.KEEP[0].result.value")
def namespace() -> None:
    KEEP.append(types.SimpleNamespace(result=types.SimpleNamespace(value=torch.ones(250))))


class Ring:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.me = [self]


@leak(OBJECTS, "planted.KEEP[0][0].value")
def reachable_cycle() -> None:
    KEEP.append(Ring(torch.ones(250)).me)


@leak(OBJECTS, "planted.KEEP[0].queue[0]")
def queued() -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    waiting.put(torch.ones(250))
    KEEP.append(waiting)


@leak(OBJECTS, "planted.KEEP[0]['x']")
def weak_values_kept_alive_elsewhere() -> None:
    x = WEAK["x"] = torch.ones(250)
    KEEP.append({"x": x})


@leak(OBJECTS, "planted.KEEP[0].__closure__[0].cell_contents")
def closure() -> None:
    x = torch.ones(250)
    KEEP.append(lambda: x)


@leak(OBJECTS, "planted.KEEP[0].__defaults__[0]")
def default_argument() -> None:
    def f(x: Any = torch.ones(250)) -> Any:  # noqa: B008 (the leak under test)
        return x

    KEEP.append(f)


@leak(OBJECTS, "planted.KEEP[0].__kwdefaults__['x']")
def keyword_default() -> None:
    def f(*, x: Any = torch.ones(250)) -> Any:  # noqa: B008 (the leak under test)
        return x

    KEEP.append(f)


@leak(OBJECTS, "leaks_in_objects.counted.last")
def function_attribute() -> None:
    counted.last = torch.ones(250)  # type: ignore[attr-defined]
    CLEANUP.callback(delattr, counted, "last")


def counted() -> None:
    pass


@leak(OBJECTS, "planted.KEEP[0].args[0]")
def partial() -> None:
    KEEP.append(functools.partial(print, torch.ones(250)))


@leak(OBJECTS, "planted.KEEP[0].keywords['file']")
def partial_keyword() -> None:
    KEEP.append(functools.partial(print, file=torch.ones(250)))


@functools.lru_cache
def table_of(size: int) -> torch.Tensor:
    return torch.ones(size)


@leak(OBJECTS, "leaks_in_objects.table_of.<functools.lru_cache>", hint=CACHE, made="table_of(250)")
def lru_cache() -> None:
    table_of(250)
    CLEANUP.callback(table_of.cache_clear)


class Lazy:
    @functools.cached_property
    def mask(self) -> torch.Tensor:
        return torch.ones(250)

    @functools.lru_cache  # noqa: B019 (the leak under test)
    def mask_of(self, size: int) -> torch.Tensor:
        return torch.ones(size)

    def method(self) -> None:
        pass


@leak(OBJECTS, "planted.KEEP[0].mask", made="lazy.mask")
def cached_property() -> None:
    lazy = Lazy()
    assert lazy.mask is not None
    KEEP.append(lazy)


@leak(OBJECTS, "leaks_in_objects.Lazy.mask_of.<functools.lru_cache>", hint=CACHE, made="mask_of(")
def lru_cache_of_a_method() -> None:
    Lazy().mask_of(250)
    CLEANUP.callback(Lazy.mask_of.cache_clear)


@leak(OBJECTS, "planted.KEEP[0].__self__.memory", made="torch.ones(250)")
def bound_method() -> None:
    lazy = Lazy()
    lazy.memory = torch.ones(250)  # type: ignore[attr-defined]
    KEEP.append(lazy.method)


@leak(OBJECTS, "planted.KEEP[0].__self__")
def method_of_a_tensor() -> None:
    KEEP.append(torch.ones(250).add)


@leak(OBJECTS, "planted.KEEP[0].__self__[0]")
def method_of_a_list() -> None:
    KEEP.append([torch.ones(250)].append)


@leak(OBJECTS, "planted.KEEP[1].__callback__.__closure__[0].cell_contents")
def callback_of_a_weak_reference() -> None:
    x = torch.ones(250)
    KEEP.append(Lazy())
    KEEP.append(weakref.ref(KEEP[0], lambda _: x))


@leak(OBJECTS, "weakref.finalize._registry[<finalize>].args[0]")
def finalizer() -> None:
    KEEP.append(Lazy())
    CLEANUP.callback(weakref.finalize(KEEP[0], print, torch.ones(250)).detach)


@leak(OBJECTS, "planted.KEEP[0].buffer[0].args[0]", hint="such as loss.item()")
def logged() -> None:
    handler = logging.handlers.BufferingHandler(100)
    logger = logging.Logger("planted")
    logger.addHandler(handler)
    logger.warning("loss %s", torch.ones(250))
    KEEP.append(handler)


@leak(OBJECTS, "planted.KEEP[0][0].message.args[1]")
def warned() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(UserWarning("odd tensor", torch.ones(250)), stacklevel=1)
    KEEP.append(caught)


@leak(OBJECTS, "planted.KEEP[0]._mock_call_args")
def mocked() -> None:
    model = mock.Mock()
    model(torch.ones(250))
    KEEP.append(model)


class Callback:
    """Equal to any other, so that it can be unregistered without a reference to it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Callback)

    __hash__ = None  # type: ignore[assignment]


@leak(OBJECTS, "signal.getsignal(signal.SIGTERM).__kwdefaults__['kept']")
def handler_of_a_signal() -> None:
    memory = torch.ones(250)
    before = signal.signal(signal.SIGTERM, lambda *_, kept=memory: None)
    CLEANUP.callback(signal.signal, signal.SIGTERM, before)


# Since Python 3.14, a tuple that only C code references has the function.
_FROM_C = "tuple[0] -> " if sys.version_info >= (3, 14) else ""


@leak(OBJECTS, f"C or C++ code, which references {_FROM_C}Callback.", hint="to find the owner")
def at_exit() -> None:
    atexit.register(Callback(torch.ones(250)))
    CLEANUP.callback(atexit.unregister, Callback(None))
