"""The paths of modules in the networks that they are part of: ``encoder.layers.2.linear1``."""

import gc
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_cka_memory.holders.torch_references import class_name
from pytest_cka_memory.units import counted

if TYPE_CHECKING:
    from torch import nn

_MOST_NAMED = 2


def paths_of(identities: Collection[int]) -> dict[int, str]:
    """Return the paths of the live modules with these identities; empty without identities.

    The path starts inside the outermost module, which is named by its class if the path would start
    with a number: ``Sequential.0``. A module that has been freed is left out. If another has its
    identity since, that one is named.
    """
    if not identities:
        return {}
    from torch import nn

    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    parents: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        for name, child in _children(module):
            parents.setdefault(id(child), (module, name))
    return {id(it): _path(it, parents) for it in modules if id(it) in identities}


def _children(module: "nn.Module") -> Iterator[tuple[str, "nn.Module"]]:
    from torch import nn

    try:  # as nn.Module defines it: the user's class may override it
        yield from list(nn.Module.named_children(module))
    except AttributeError:  # its __init__ has not run
        return


def _path(module: "nn.Module", parents: Mapping[int, tuple["nn.Module", str]]) -> str:
    names: list[str] = []
    inside = {id(module)}
    current = module
    while id(current) in parents:
        current, name = parents[id(current)]
        if id(current) in inside:  # a module may contain itself
            break
        inside.add(id(current))
        names.append(name)
    if not names or names[-1].isdecimal():  # "0" alone would say nothing
        names.append(class_name(type(current)))
    return ".".join(reversed(names))


def largest(modules: Iterable[tuple[int, int]], paths: Mapping[int, str]) -> str | None:
    """Return the paths of the modules that allocated most bytes, and how many more there are.

    Of modules that differ only in numbers, such as the layers of a network, one is named.

    Args:
        modules: pairs of a module's identity and bytes.
        paths: identity -> path.
    """
    sizes: Counter[str] = Counter()
    for identity, size in modules:
        if identity in paths:
            sizes[paths[identity]] += size
    alike: dict[str, list[str]] = {}
    total: Counter[str] = Counter()
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        pattern = re.sub(r"\b\d+\b", "*", path)
        alike.setdefault(pattern, []).append(path)
        total[pattern] += size
    named = [alike.pop(pattern) for pattern, _ in total.most_common(_MOST_NAMED)]
    texts = [f"{path} (and {len(rest)} like it)" if rest else path for path, *rest in named]
    others = sum(map(len, alike.values()))
    texts += [counted(others, "more module")] if others else []
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else "".join(texts) or None
