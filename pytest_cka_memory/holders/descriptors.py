"""Write references through descriptors so that the expression gives the same object when typed.

``A.f`` does not give what the class ``A`` has under this name if that is a descriptor: of a
``staticmethod`` it gives the function, of a ``functools.partialmethod`` a new object, and other
descriptors may run any code. What the class has is then written as ``A.__dict__["f"]``.
"""

import functools
import keyword
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

from pytest_cka_memory.holders.tree import Reference
from pytest_cka_memory.meters.autograd_nodes import mro

_DICT = ".__dict__"
_NAME = re.compile(r"\.(.+)|\['(\w+)'\]")
_namespace_of = type.__dict__["__dict__"].__get__


def _found(kind: type, name: str) -> Any:
    """Return what a class or its bases have under a name, without calling a descriptor."""
    return next((space[name] for cls in mro(kind) if name in (space := _namespace_of(cls))), None)


_GIVES_ITSELF = frozenset(
    id(_found(kind, "__get__"))
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
        *((functools.partial,) if _found(functools.partial, "__get__") else ()),
    )
    if kind is type(None) or _found(kind, "__get__") is not None
)
"""The methods ``__get__`` that return the descriptor itself if a class is asked for it."""


def typed(path: Sequence[Reference], texts: Sequence[str]) -> list[str]:
    """Return the texts of the references of a path, with those through descriptors rewritten.

    Args:
        path: references from a root to an object.
        texts: how each of them is written, if no attribute is a descriptor.
    """
    found = list(texts)
    for number in range(1, len(path)):
        step, after = path[number], path[number + 1] if number + 1 < len(path) else None
        in_dict = number > 1 and texts[number - 1] == _DICT
        owner = path[number - 1].parent if in_dict else step.parent
        name = _name_in(texts[number], is_entry=in_dict)
        if name is None or not _is_attribute(owner, name, step.value):
            continue
        is_static = issubclass(type(owner), type) and type(step.value) is staticmethod
        if is_static and after is not None and after.value is step.value.__func__:
            found[number + 1] = ""  # typing the attribute gives the function
        elif not _can_be_typed(owner, name, step.value, after):
            found[number] = f'{_DICT}["{name}"]'
            if in_dict:
                found[number - 1] = ""
    return found


def _name_in(text: str, *, is_entry: bool) -> str | None:
    match = _NAME.fullmatch(text)
    return match[2 if is_entry else 1] if match else None


def _is_attribute(owner: Any, name: str, value: Any) -> bool:
    """Whether an object, or a class, has a value under a name in its own dict."""
    if issubclass(type(owner), type):
        return _namespace_of(owner).get(name) is value
    own = _found(type(owner), "__dict__")
    if type(own) is not types.GetSetDescriptorType:
        return False
    names = own.__get__(owner)
    return isinstance(names, dict) and dict.get(names, name) is value


def _can_be_typed(owner: Any, name: str, value: Any, after: Reference | None) -> bool:
    """Whether ``owner.name`` gives `value`, or what leads from there to the next object."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    is_class = issubclass(type(owner), type)
    above = _found(type(owner), name) if type(owner) is not type else None
    if above is not None and _has(above, "__set__", "__delete__"):  # it is read instead
        return False
    if not is_class or id(_found(type(value), "__get__")) in _GIVES_ITSELF:
        return True
    # A bound method has the function that the class method was made of.
    return type(value) is classmethod and after is not None and _binds(value, after.value)


def _binds(method: "classmethod[Any, Any, Any]", function: Any) -> bool:
    kinds = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)
    return method.__func__ is function and type(function) in kinds


def _has(value: Any, *names: str) -> bool:
    return any(_found(type(value), name) is not None for name in names)


def typed_class(cls: type) -> str | None:
    """Return how to type a class: its module and name; None if that is not this class."""
    module, name = (
        _namespace_of(type)[part].__get__(cls) for part in ("__module__", "__qualname__")
    )
    found: Any = sys.modules.get(module)
    names = vars(found) if type(found) is types.ModuleType else {}
    for part in str(name).split("."):
        found = names.get(part)
        names = _namespace_of(found) if issubclass(type(found), type) else {}
    if found is not cls:
        return None
    return name if module == "builtins" else f"{module}.{name}"
