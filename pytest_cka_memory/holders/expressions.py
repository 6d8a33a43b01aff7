"""Write a path of references as an expression that a user can type: ``net.CACHE['x'][3]``.

Fields and containers are read from memory, because a property or ``__getattr__`` may run any code.
"""

import functools
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pytest_cka_memory.holders.roots import locals_of
from pytest_cka_memory.holders.search import Reference
from pytest_cka_memory.holders.torch_references import class_name
from pytest_cka_memory.meters.autograd_nodes import mro

_MAX_LENGTH = 240
_MAX_KEY = 60
_FRAMES = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_COMPUTED = {
    "builtins.function": ("__defaults__", "__kwdefaults__"),
    "builtins.builtin_function_or_method": ("__self__",),
    "builtins.cell": ("cell_contents",),
    "builtins.traceback": ("tb_next",),
    "builtins.generator": ("gi_yieldfrom",),
    "builtins.coroutine": ("cr_await",),
    "builtins.async_generator": ("ag_await",),
    "builtins.BaseException": ("__traceback__", "__context__", "__cause__", "args"),
    "_asyncio.Future": ("_result", "_exception"),
    "_asyncio.Task": ("_coro", "_result", "_exception"),
}
"""Attributes that are not plain fields but can be read without running the user's code."""
_END_OF_ROOT = r"(?:, a global)?(?: in \S+)? \([^()]*\)$"
_SUBSCRIPT = r"\[(?:'(?:[^'\\]|\\.)*'|\"[^\"]*\"|(?:[^][]|\[[^][]*\])*)\]"


class _InList(str):
    """The index of a key or element, which only a list of all of them has."""

    __slots__ = ()


def expression_of(path: Sequence[Reference]) -> str:
    """Return the references from a root to an object as an expression."""
    first = path[0]
    assert first.root is not None, "a path starts at a root"
    text = f"{first.root.prefix}{first.text}"
    for step in path[1:]:
        part = step.text or text_of(step.parent, step.value)
        text = f"list({text}){part}" if isinstance(part, _InList) else f"{text}{part}"
    return shortened(text) + first.root.suffix


def pattern_of(expression: str | None) -> str | None:
    """Return an expression without its keys and indices: equal for entries of one container.

    What the graph of one tensor holds is equal too: each batch may make a part of the graph.
    """
    if expression is None:
        return None
    return re.sub(r"\.grad_fn\b.*", ".grad_fn", re.sub(_SUBSCRIPT, "[]", expression))


def without_root(expression: str) -> str:
    """Return an expression without the function or the kind of name with which it ends."""
    return re.sub(_END_OF_ROOT, "", expression)


def is_own_dict(value: Any, parent: Any) -> bool:
    """Whether `value` is the dict of the attributes of `parent`."""
    return _dict_of(parent, mro(type(parent))) is value


def text_of(parent: Any, child: Any) -> str:
    """Return how to write the reference from `parent` to `child`."""
    for text in _texts_of(parent, child):
        return text
    return f" -> {class_name(type(child))}"


def _texts_of(parent: Any, child: Any) -> Iterator[str]:
    """Every way to write the reference from `parent` to `child`, best first."""
    kind = type(parent)
    if issubclass(kind, (list, tuple, deque)):
        yield from _items(parent, child)
    elif issubclass(kind, dict):
        yield from _entries(parent, child)
    elif issubclass(kind, (set, frozenset)):
        iterate = set.__iter__ if issubclass(kind, set) else frozenset.__iter__
        yield from _elements(iterate(parent), child)
    elif kind in _FRAMES:
        if (frame := getattr(parent, _FRAMES[kind])) is not None:
            yield from (f".{_FRAMES[kind]}{local}" for local in _locals(frame, child))
    elif kind is types.FrameType:
        yield from _locals(parent, child)
    yield from _attributes(parent, child)
    if issubclass(kind, functools._lru_cache_wrapper):
        yield ".<functools.lru_cache>"
    if issubclass(kind, type):
        yield from _class_attributes(parent, child)


def _items(parent: Any, child: Any) -> Iterator[str]:
    base = next(cls for cls in mro(type(parent)) if cls in (list, tuple, deque))
    names = _namespace(type(parent)).get("_fields") if base is tuple else None
    for index in _places(parent, base.__iter__, child):
        yield f".{names[index]}" if names else f"[{index}]"


_remembered: dict[int, dict[int, list[int]]] | None = None
"""By the identity of a long list, where each of its elements is; None if that is not kept.

It references none of them, because references to them are counted meanwhile."""
_LONG = 100


@contextmanager
def remembering_places() -> Iterator[None]:
    """Look through each long list only once in the block, which keeps the lists alive.

    To describe n tensors that one list has would otherwise look at n elements n times.
    """
    global _remembered
    before, _remembered = _remembered, {}
    try:
        yield
    finally:
        _remembered = before


def _places(parent: Any, iterate: Callable[[Any], Iterator[Any]], child: Any) -> Sequence[int]:
    """Return every index of `child` in a list, tuple or deque."""
    known = None if _remembered is None else _remembered.get(id(parent))
    if known is None:
        values = tuple(iterate(parent))
        if _remembered is None or len(values) < _LONG:
            return [index for index, value in enumerate(values) if value is child]
        places: dict[int, list[int]] = {}
        for index, value in enumerate(values):
            places.setdefault(id(value), []).append(index)
        known = _remembered[id(parent)] = places
    return known.get(id(child), ())


def _entries(parent: dict[Any, Any], child: Any) -> Iterator[str]:
    entries = list(dict.items(parent))  # a copy, because another thread may add to it
    yield from (f"[{_key_text(key)}]" for key, value in entries if value is child)
    yield from _elements((key for key, _ in entries), child)


def _elements(values: Iterable[Any], child: Any) -> Iterator[str]:
    """Every index of `child` in a list of `values`."""
    yield from (_InList(f"[{index}]") for index, it in enumerate(tuple(values)) if it is child)


def _locals(frame: types.FrameType, child: Any) -> Iterator[str]:
    yield from _named(".f_locals[%r]", locals_of(frame), child)


def _attributes(parent: Any, child: Any) -> Iterator[str]:
    classes = mro(type(parent))
    own = _dict_of(parent, classes)
    if own is not None:
        yield from _named(".%s", own, child)
    for cls in classes:
        computed = _COMPUTED.get(full_name(cls), ())
        for name, descriptor in list(_namespace(cls).items()):
            is_field = type(descriptor) is types.MemberDescriptorType or name in computed
            if is_field and _read(descriptor, parent) is child:
                yield f".{name}"
    if own is child:
        yield ".__dict__"


def _class_attributes(parent: type, child: Any) -> Iterator[str]:
    names = dict(_namespace(parent))
    yield from _named(".%s", names, child)
    if type(child) is dict and child.keys() == names.keys():  # the dict behind the mappingproxy
        yield ".__dict__"


def _named(form: str, names: dict[str, Any], child: Any) -> Iterator[str]:
    yield from (form % name for name, value in list(dict.items(names)) if value is child)


def _dict_of(value: Any, classes: Iterable[type]) -> dict[str, Any] | None:
    for cls in classes:
        descriptor = _namespace(cls).get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType and cls is not type:
            found = _read(descriptor, value)
            return found if isinstance(found, dict) else None
    return None


def _namespace(cls: type) -> types.MappingProxyType[str, Any]:
    """Return a class's own attributes, even if its metaclass overrides ``__dict__``."""
    found: types.MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return found


def full_name(cls: type) -> str:
    """Return the module and the name of a class, even if its metaclass overrides them."""
    module, name = (type.__dict__[part].__get__(cls) for part in ("__module__", "__qualname__"))
    return f"{module}.{name}"


def _read(descriptor: Any, value: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except (AttributeError, ValueError):  # an unset slot or an empty cell
        return None


def _key_text(key: Any) -> str:
    if type(key) is tuple:
        text = f"({', '.join(map(_key_text, key))}{',' * (len(key) == 1)})"
    elif type(key) in (str, int, float, bytes, bool, type(None)):
        text = repr(key)
    elif full_name(type(key)) in _WRITTEN:
        text = _WRITTEN[full_name(type(key))](key)
    else:
        text = f"<{class_name(type(key))}>"
    return text if len(text) <= _MAX_KEY else f"{text[:_MAX_KEY]}…"


_WRITTEN: dict[str, Callable[[Any], str]] = {
    "torch.Size": lambda size: f"torch.Size([{', '.join(map(_key_text, tuple.__iter__(size)))}])",
    "torch.dtype": str,
    "torch.device": lambda device: f"torch.device({str(device)!r})",
}
"""How to write keys of torch's own types."""


def shortened(text: str) -> str:
    """Write submodules as users do, and shorten long chains of autograd nodes and long paths."""
    text = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
    text = re.sub(r"(?:\.next_functions\[\d+\]\[0\]){3,}", " … ", text)
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH // 2]} … {text[-_MAX_LENGTH // 2 :]}"
