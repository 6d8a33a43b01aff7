"""Write a path of references as code a user could type: ``net.CACHE['x'][3]``."""

import functools
import re
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_cka_memory.references import Step, locals_of

_LONGEST_KEY = 40
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    types.MethodType: ("__self__", "__func__"),
    types.CellType: ("cell_contents",),
    types.TracebackType: ("tb_frame", "tb_next"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}
_FRAMES = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}


def written(path: Sequence[Step]) -> str:
    """Write the steps from a root to an object as an expression."""
    first = path[0]
    assert first.root is not None, "a path starts at a root"
    edges = [step.edge or _edge(step.parent, step.value) for step in path[1:]]
    text = f"{first.root.prefix}{first.edge}{''.join(edges)}"
    return _shortened(text) + first.root.suffix


def _edge(parent: Any, child: Any) -> str:
    for text in _edges(parent, child):
        return text
    return f" -> {type(child).__name__}"


def _edges(parent: Any, child: Any) -> Iterator[str]:
    """Every way to write how `parent` refers to `child`, best first."""
    kind = type(parent)
    if isinstance(parent, dict):
        yield from (f"[{_key(key)}]" for key, value in dict.items(parent) if value is child)
        yield from (" (a key)" for key in dict.keys(parent) if key is child)
    elif isinstance(parent, (list, tuple, deque)):
        names = getattr(kind, "_fields", None)
        for index, value in enumerate(parent):
            if value is child:
                yield f".{names[index]}" if names else f"[{index}]"
    elif isinstance(parent, (set, frozenset)):
        yield " (an element)"
    elif kind in _FRAMES:
        frame = getattr(parent, _FRAMES[kind])
        yield from _named(
            f".{_FRAMES[kind]}.f_locals[%r]", locals_of(frame) if frame else {}, child
        )
    elif isinstance(parent, types.FrameType):
        yield from _named(".f_locals[%r]", locals_of(parent), child)
    elif isinstance(parent, functools._lru_cache_wrapper) and not _is_attribute(parent, child):
        yield ".<functools.lru_cache>"
    elif isinstance(parent, type):
        yield from _named(".%s", dict(vars(parent)), child)
        if type(child) is dict and child.keys() == vars(parent).keys():  # the one behind the proxy
            yield ".__dict__"
    yield from _attributes(parent, child)
    if child is _dict_of(parent):
        yield ".__dict__"


def _attributes(parent: Any, child: Any) -> Iterator[str]:
    yield from _named(".%s", _dict_of(parent) or {}, child)
    for cls in type(parent).__mro__:
        for name in (*_slots(cls), *_ATTRIBUTES.get(cls, ())):
            if _get(parent, name) is child:
                yield f".{name}"
    if isinstance(parent, BaseException):
        for name in ("__traceback__", "__context__", "__cause__", "args"):
            if getattr(parent, name) is child:
                yield f".{name}"


def _is_attribute(parent: Any, child: Any) -> bool:
    values = (_dict_of(parent) or {}).values()
    return any(value is child for value in values) or child is _dict_of(parent)


def _named(form: str, names: dict[Any, Any], child: Any) -> Iterator[str]:
    yield from (form % name for name, value in names.items() if value is child)


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _get(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except Exception:  # a slot not set, a graph already freed, a property that raises
        return None


def _key(key: Any) -> str:
    if isinstance(key, (str, int, float, bytes, bool, type(None))):
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
    return f"<{type(key).__name__}>"


def _shortened(text: str) -> str:
    """Write modules' children and long chains of autograd nodes as people do."""
    text = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
    return re.sub(r"(?:\.next_functions\[\d+\]\[0\]){3,}", " … ", text)


def kind(path: str | None) -> str | None:
    """Return a path without its keys and indices: equal for entries of one container."""
    return None if path is None else re.sub(r"\[(?:'[^']*'|\d+)\]", "[]", path)
