"""Write a path of references as code a user could type: ``net.CACHE['x'][3]``.

Reads fields and containers as they are in memory: a property or a ``__getattr__`` may do anything.
"""

import functools
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_cka_memory.holders.roots import locals_of
from pytest_cka_memory.holders.search import Step
from pytest_cka_memory.holders.torch_references import mro

_LONGEST = 240
_LONGEST_KEY = 40
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
"""What is no plain field, but can be asked for without running any code."""
_CODE = r"\[(?:'(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^][]*)\]"


def written(path: Sequence[Step]) -> str:
    """Write the steps from a root to an object as an expression."""
    first = path[0]
    assert first.root is not None, "a path starts at a root"
    edges = [step.edge or _edge(step.parent, step.value) for step in path[1:]]
    text = f"{first.root.prefix}{first.edge}{''.join(edges)}"
    return _shortened(text) + first.root.suffix


def kind(path: str | None) -> str | None:
    """Return a path without its keys and indices: equal for entries of one container."""
    return None if path is None else re.sub(_CODE, "[]", path)


def _edge(parent: Any, child: Any) -> str:
    for text in _edges(parent, child):
        return text
    return f" -> {type(child).__name__}"


def _edges(parent: Any, child: Any) -> Iterator[str]:
    """Every way to write how `parent` refers to `child`, best first."""
    kind = type(parent)
    if issubclass(kind, (list, tuple, deque)):
        yield from _items(parent, child)
    elif issubclass(kind, dict):
        yield from _entries(parent, child)
    elif issubclass(kind, (set, frozenset)):
        yield " (an element)"
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
    names = _of(type(parent)).get("_fields") if base is tuple else None
    for index, value in enumerate(tuple(base.__iter__(parent))):
        if value is child:
            yield f".{names[index]}" if names else f"[{index}]"


def _entries(parent: dict[Any, Any], child: Any) -> Iterator[str]:
    entries = list(dict.items(parent))  # at once: another thread may add to it
    yield from (f"[{_key(key)}]" for key, value in entries if value is child)
    yield from (" (a key)" for key, _ in entries if key is child)


def _locals(frame: types.FrameType, child: Any) -> Iterator[str]:
    yield from _named(".f_locals[%r]", locals_of(frame), child)


def _attributes(parent: Any, child: Any) -> Iterator[str]:
    classes = mro(type(parent))
    own = _dict_of(parent, classes)
    if own is not None:
        yield from _named(".%s", own, child)
    for cls in classes:
        computed = _COMPUTED.get(_full_name(cls), ())
        for name, descriptor in list(_of(cls).items()):
            is_field = type(descriptor) is types.MemberDescriptorType or name in computed
            if is_field and _read(descriptor, parent) is child:
                yield f".{name}"
    if own is child:
        yield ".__dict__"


def _class_attributes(parent: type, child: Any) -> Iterator[str]:
    names = dict(_of(parent))
    yield from _named(".%s", names, child)
    if type(child) is dict and child.keys() == names.keys():  # the one behind the proxy
        yield ".__dict__"


def _named(form: str, names: dict[str, Any], child: Any) -> Iterator[str]:
    yield from (form % name for name, value in list(dict.items(names)) if value is child)


def _dict_of(value: Any, classes: Iterable[type]) -> dict[str, Any] | None:
    for cls in classes:
        descriptor = _of(cls).get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType and cls is not type:
            found = _read(descriptor, value)
            return found if isinstance(found, dict) else None
    return None


def _of(cls: type) -> types.MappingProxyType[str, Any]:
    """A class's own attributes, whatever its metaclass says."""
    found: types.MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return found


def _full_name(cls: type) -> str:
    module, name = (type.__dict__[part].__get__(cls) for part in ("__module__", "__qualname__"))
    return f"{module}.{name}"


def _read(descriptor: Any, value: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except (AttributeError, ValueError):  # a slot not set, an empty cell
        return None


def _key(key: Any) -> str:
    if type(key) is tuple:
        text = f"({', '.join(map(_key, key))}{',' * (len(key) == 1)})"
    elif type(key) in (str, int, float, bytes, bool, type(None)):
        text = repr(key)
    else:
        text = f"<{type(key).__name__}>"
    return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"


def _shortened(text: str) -> str:
    """Write modules' children, long chains of autograd nodes and endless paths as people do."""
    text = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
    text = re.sub(r"(?:\.next_functions\[\d+\]\[0\]){3,}", " … ", text)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
