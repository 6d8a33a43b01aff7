"""Write a path of references as an expression that a user can type: ``net.CACHE['x'][3]``.

Fields and containers are read from memory, because a property or ``__getattr__`` may run any code.

Typing ``A.f`` does not give what the class ``A`` has under this name if that is a descriptor: of a
``staticmethod`` it gives the function, of a ``functools.partialmethod`` a new object, and other
descriptors may run any code. What the class has is then written as ``A.__dict__["f"]``.
"""

import functools
import keyword
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pytest_cka_memory.holders import Reference, ReferencePath, locals_of
from pytest_cka_memory.holders.tensors import class_name
from pytest_cka_memory.meters.objects import mro

_MAX_LENGTH = 240
"""Characters of an expression; of a longer one, the first and the last."""
_MAX_KEY = 60
_LONG = 100
"""Entries of a container that is remembered in :func:`remembering_places`."""
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
_DICT = ".__dict__"
_NAME = re.compile(r"\.(.+)|\['(\w+)'\]")
_namespace_of: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
"""Returns a class's own attributes, even if its metaclass overrides ``__dict__``."""
_END_OF_ROOT = r"(?:, a global)?(?: in \S+)? \([^()]*\)$"
_SUBSCRIPT = r"\[(?:'(?:[^'\\]|\\.)*'|\"[^\"]*\"|(?:[^][]|\[[^][]*\])*)\]"


class _InList(str):
    """Stands for the index of a key or element, which only a list of all of them shows."""

    __slots__ = ()


def expression_of(path: ReferencePath) -> str:
    """Return the references from a root to an object as an expression.

    Example:
        The path from the globals of the module ``net`` through a list to its fourth element is
        ``net.LOSSES[3]``; a local variable is ``losses[3] in train (loop.py:12)``.
    """
    first = path[0]
    assert first.root is not None, "a path starts at a root"
    parts = [
        "",
        *(reference.text or text_of(reference.parent, reference.value) for reference in path[1:]),
    ]
    # Joined once, because a path may have a million references.
    written = [f"{first.root.prefix}{first.text}"]
    lists = 0
    for part in _typed(path, parts)[1:]:
        is_in_list = isinstance(part, _InList)
        lists += is_in_list
        written.append(f"){part}" if is_in_list else part)
    return shortened("list(" * lists + "".join(written)) + first.root.suffix


def local_expression_of(path: ReferencePath) -> str:
    """Return a path as an expression, without the function whose variable it begins with."""
    root = path[0].root
    return expression_of(path).removesuffix("" if root is None else root.suffix)


def without_places(expression: str) -> str:
    """Return an expression without its keys, its indices and the numbers in its names.

    It is equal for entries of one container, and for attributes such as ``batch_1`` and
    ``batch_2``.
    """
    return re.sub(r"\d+", "#", re.sub(_SUBSCRIPT, "[]", expression))


def without_root(expression: str) -> str:
    """Return an expression without the function or the kind of name with which it ends."""
    return re.sub(_END_OF_ROOT, "", expression)


def is_own_dict(value: Any, parent: Any) -> bool:
    """Whether `value` is the dict of the attributes of `parent`."""
    return _dict_of(parent, mro(type(parent))) is value


def text_of(parent: Any, child: Any) -> str:
    """Return how to write the reference from `parent` to `child`: ``.grad``, ``['x']``, ``[3]``.

    Where Python has no expression for it, that is `` -> `` and the class of `child`.
    """
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
        base: Any = set if issubclass(kind, set) else frozenset
        yield from _elements(parent, base.__len__(parent), lambda: base.__iter__(parent), child)
    elif kind in _FRAMES:
        if (frame := getattr(parent, _FRAMES[kind])) is not None:
            yield from (f".{_FRAMES[kind]}{local}" for local in _locals(frame, child))
    elif kind is types.FrameType:
        yield from _locals(parent, child)
    elif kind is types.MappingProxyType:
        yield ""  # it is read as the mapping is
    yield from _attributes(parent, child)
    if issubclass(kind, functools._lru_cache_wrapper):
        yield ".<functools.lru_cache>"
    if issubclass(kind, type):
        yield from _class_attributes(parent, child)


def _items(parent: Any, child: Any) -> Iterator[str]:
    base = next(cls for cls in mro(type(parent)) if cls in (list, tuple, deque))
    names = _namespace_of(type(parent)).get("_fields") if base is tuple else None
    length: int = base.__len__(parent)
    for index in _places(
        parent, "", length, lambda: enumerate(tuple(base.__iter__(parent))), child
    ):
        yield f".{names[index]}" if names else f"[{index}]"


_remembered: dict[tuple[int, str], dict[int, Any]] | None = None
"""By the identity of a long container and the part of it: by the identity of each child, its place.
None outside of :func:`remembering_places`.

It references no child, because a proof counts the references to them meanwhile."""
_PRIMITIVES = (str, int, float, bytes, bool, type(None))


class _Written(str):
    """A key of a dict as text, in the place of the key itself."""

    __slots__ = ()


@contextmanager
def remembering_places() -> Iterator[None]:
    """Look through each long container only once in the block, which keeps them alive.

    To describe n tensors that one list has would otherwise look at n elements n times.
    """
    global _remembered
    before, _remembered = _remembered, {}
    try:
        yield
    finally:
        _remembered = before


def _places(
    parent: Any,
    part: str,
    length: int,
    entries: Callable[[], Iterable[tuple[Any, Any]]],
    child: Any,
) -> Iterator[Any]:
    """Yield each place of `child` in a container; only the first in one that is remembered.

    Args:
        parent: the container, or the object whose attributes are looked through.
        part: which part of it that is.
        length: how many entries there are.
        entries: returns a place, such as an index, and what is there, for each entry.
        child: the object to find.
    """
    if _remembered is None or length < _LONG:
        yield from (place for place, value in entries() if value is child)
        return
    known = _remembered.get((id(parent), part))
    if known is None:
        known = _remembered[id(parent), part] = {}
        for place, value in entries():
            known.setdefault(id(value), place)
    if id(child) in known:
        yield known[id(child)]


def _entries(parent: dict[Any, Any], child: Any) -> Iterator[str]:
    length = dict.__len__(parent)

    def keys() -> Iterator[tuple[Any, Any]]:
        # A copy, because another thread may add to it. The key may be what references are counted
        # of, so only those of plain types are kept.
        for key, value in list(dict.items(parent)):
            yield key if type(key) in _PRIMITIVES else _Written(_key_text(key)), value

    for key in _places(parent, "values", length, keys, child):
        yield f"[{key if type(key) is _Written else _key_text(key)}]"
    yield from _elements(parent, length, lambda: dict.__iter__(parent), child)


def _elements(
    parent: Any, length: int, values: Callable[[], Iterator[Any]], child: Any
) -> Iterator[str]:
    """Every index of `child` in a list of `values`."""
    places = _places(parent, "keys", length, lambda: enumerate(tuple(values())), child)
    yield from (_InList(f"[{index}]") for index in places)


def _locals(frame: types.FrameType, child: Any) -> Iterator[str]:
    names = locals_of(frame)
    yield from (f".f_locals[{name!r}]" for name in _named(frame, names, child))


def _attributes(parent: Any, child: Any) -> Iterator[str]:
    classes = mro(type(parent))
    own = _dict_of(parent, classes)
    if own is not None:
        yield from (f".{name}" for name in _named(parent, own, child))
    for cls in classes:
        computed = _COMPUTED.get(full_name(cls), ())
        for name, descriptor in list(_namespace_of(cls).items()):
            is_field = type(descriptor) is types.MemberDescriptorType or name in computed
            if is_field and _read(descriptor, parent) is child:
                yield f".{name}"
    if own is child:
        yield ".__dict__"


def _class_attributes(parent: type, child: Any) -> Iterator[str]:
    names = _namespace_of(parent)
    yield from (f".{name}" for name in _named(parent, names, child))
    if type(child) is dict and child.keys() == names.keys():  # the dict behind the mappingproxy
        yield ".__dict__"


def _named(parent: Any, names: Mapping[str, Any], child: Any) -> Iterator[str]:
    """Yield the names that `child` has among those of `parent`."""
    return _places(parent, "names", len(names), lambda: list(names.items()), child)


def _dict_of(value: Any, classes: Iterable[type]) -> dict[str, Any] | None:
    for cls in classes:
        descriptor = _namespace_of(cls).get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType and cls is not type:
            names = _read(descriptor, value)
            return names if isinstance(names, dict) else None
    return None


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
    elif type(key) in _PRIMITIVES:
        text = repr(key)
    elif issubclass(type(key), type) and (name := _typed_class(key)) is not None:
        text = name
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


def _in_class(kind: type, name: str) -> Any:
    """Return what a class or its bases have under a name, without calling a descriptor."""
    return next((space[name] for cls in mro(kind) if name in (space := _namespace_of(cls))), None)


_GIVES_ITSELF = frozenset(
    id(_in_class(kind, "__get__"))
    for kind in (
        types.FunctionType,
        types.MethodType,
        types.MemberDescriptorType,
        types.GetSetDescriptorType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        property,
        functools.cached_property,
        functools._lru_cache_wrapper,
        type(None),  # has no such method
        *((functools.partial,) if _in_class(functools.partial, "__get__") else ()),
    )
    if kind is type(None) or _in_class(kind, "__get__") is not None
)
"""The methods ``__get__`` that return the descriptor itself if a class is asked for it."""


def _typed(path: ReferencePath, texts: Sequence[str]) -> list[str]:
    """Return the texts of the references of a path, with those through descriptors rewritten.

    Args:
        path: references from a root to an object.
        texts: how each of them is written, if no attribute is a descriptor.
    """
    written = list(texts)
    for number in range(1, len(path)):
        reference, after = path[number], path[number + 1] if number + 1 < len(path) else None
        in_dict = number > 1 and texts[number - 1] == _DICT
        owner = path[number - 1].parent if in_dict else reference.parent
        name = _name_in(texts[number], is_entry=in_dict)
        if name is None or not _is_attribute(owner, name, reference.value):
            continue
        is_static = issubclass(type(owner), type) and type(reference.value) is staticmethod
        if is_static and after is not None and after.value is reference.value.__func__:
            written[number + 1] = ""  # typing the attribute gives the function
        elif not _can_be_typed(owner, name, reference.value, after):
            written[number] = f'{_DICT}["{name}"]'
            if in_dict:
                written[number - 1] = ""
    return written


def _name_in(text: str, *, is_entry: bool) -> str | None:
    match = _NAME.fullmatch(text)
    return match[2 if is_entry else 1] if match else None


def _is_attribute(owner: Any, name: str, value: Any) -> bool:
    """Whether an object, or a class, has a value under a name in its own dict."""
    if issubclass(type(owner), type):
        return _namespace_of(owner).get(name) is value
    own = _in_class(type(owner), "__dict__")
    if type(own) is not types.GetSetDescriptorType:
        return False
    names = own.__get__(owner)
    return isinstance(names, dict) and dict.get(names, name) is value


def _can_be_typed(owner: Any, name: str, value: Any, after: Reference | None) -> bool:
    """Whether ``owner.name`` gives `value`, or what leads from there to the next object."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    is_class = issubclass(type(owner), type)
    above = _in_class(type(owner), name) if type(owner) is not type else None
    if above is not None and _has(above, "__set__", "__delete__"):  # it is read instead
        return False
    if not is_class or id(_in_class(type(value), "__get__")) in _GIVES_ITSELF:
        return True
    # A bound method has the function that the class method was made of.
    return type(value) is classmethod and after is not None and _binds(value, after.value)


def _binds(method: "classmethod[Any, Any, Any]", function: Any) -> bool:
    kinds = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)
    return method.__func__ is function and type(function) in kinds


def _has(value: Any, *names: str) -> bool:
    return any(_in_class(type(value), name) is not None for name in names)


def _typed_class(cls: type) -> str | None:
    """Return how to type a class: its module and name; None if that is not this class."""
    module, name = (
        _namespace_of(type)[part].__get__(cls) for part in ("__module__", "__qualname__")
    )
    value: Any = sys.modules.get(module)
    # Of a lazily loaded module, which is of another type, vars() would run its code.
    names: Mapping[str, Any] = vars(value) if type(value) is types.ModuleType else {}
    for part in str(name).split("."):
        value = names.get(part)
        names = _namespace_of(value) if issubclass(type(value), type) else {}
    if value is not cls:
        return None
    return name if module == "builtins" else f"{module}.{name}"
