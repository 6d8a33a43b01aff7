"""Who refers to an object: one forward search from everything a program can name.

Forward, from module globals and the locals of running frames, because one pass finds every target
at once; a backward search costs as much again for each.
"""

import gc
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CO_OPTIMIZED = 0x1
"""Code whose locals live in slots: its ``f_locals`` is a copy."""

# fmt: off
_LEAVES = frozenset((
    str, bytes, bytearray, int, float, complex, bool, type(None), type(...), types.CodeType,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, range, slice, weakref.ref,
))
# fmt: on
_LATE_DEPTH = 3
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Root:
    """Where a search starts: values by name, and how to write those names."""

    prefix: str
    """Written before a name: ``net.`` for a module's globals, empty for a frame's locals."""
    suffix: str
    """Written at the end of a path: `` in train (loop.py:12)`` for a frame's locals."""
    names: Mapping[str, Any]
    is_library: bool = False
    """Whether these are names of installed code, which few readers would type first."""


@dataclass(frozen=True)
class Step:
    """An object on a path, and what led to it: an object, or the root and the name in it."""

    value: Any
    parent: Any
    root: Root | None = None
    edge: str | None = None
    """How to write the step, where that is known: a name in the root, or ``.grad_fn``."""


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's locals without leaving the frame a copy that would keep them alive."""
    live = frame.f_locals
    found = dict(live)
    # Before Python 3.13 the frame caches the dict it gave us, and with it every local's value.
    if type(live) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
        live.clear()
    return found


def frame_roots(is_own: Callable[[str], bool]) -> Iterator[Root]:
    """The locals of every frame that is running, in any thread, innermost first."""
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if not is_own(code.co_filename) and code.co_flags & CO_OPTIMIZED:
                where = f" in {code.co_name} ({_base(code.co_filename)}:{frame.f_lineno})"
                yield Root("", where, locals_of(frame), code.co_filename.startswith(_LIBRARIES))
            frame = frame.f_back


def module_roots() -> Iterator[Root]:
    """The globals of every imported module."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            file = getattr(module, "__file__", None) or ""
            installed = not file or file.startswith(_LIBRARIES)
            yield Root(f"{name}.", "", dict(vars(module)), installed and name != "__main__")


def search(
    found: Callable[[Any], Collection[int]],
    wanted: Collection[int],
    roots: Collection[Root],
    late_roots: Collection[Root],
    more: Callable[[Any], Iterator[tuple[str, Any]]],
) -> dict[int, list[Step]]:
    """Find a short path to each wanted thing.

    Args:
        found: which of the wanted an object is, or holds by itself.
        wanted: what to find, by key.
        roots: where to start. Modules and their globals are entered only as roots, so that no
            path leads through an import.
        late_roots: names nobody would type first: entered after a few steps from the others.
        more: references of an object that the garbage collector does not know, each written out.

    Returns:
        For each key that was found, the steps from a root to the object.
    """
    missing = set(wanted)
    paths: dict[int, list[Step]] = {}
    modules = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    barred = [item for module in modules for item in (module, vars(module))]
    steps = {id(item): Step(item, None) for item in barred}
    level: deque[Step] = deque()

    def enter(step: Step) -> None:
        # By type, never isinstance: that asks __class__, where some objects warn or raise.
        if id(step.value) in steps or type(step.value) in _LEAVES:
            return
        steps[id(step.value)] = step
        for key in found(step.value):
            if key in missing:
                missing.discard(key)
                paths[key] = _way_to(step, steps)
        level.append(step)

    def enter_roots(some: Collection[Root]) -> None:
        for root in some:
            for name, value in root.names.items():
                enter(Step(value, None, root, name))

    enter_roots(roots)
    depth = 0
    while missing and (level or depth <= _LATE_DEPTH):
        if depth == _LATE_DEPTH:
            enter_roots(late_roots)
        depth += 1
        current, level = level, deque()
        for step in current:
            for child in gc.get_referents(step.value):
                enter(Step(child, step.value))
            for edge, child in more(step.value):
                enter(Step(child, step.value, None, edge))
            if not missing:
                break
    return paths


def _way_to(step: Step, steps: Mapping[int, Step]) -> list[Step]:
    way = [step]
    while way[-1].root is None:
        way.append(steps[id(way[-1].parent)])
    return way[::-1]


def _base(filename: str) -> str:
    return filename.replace("\\", "/").rpartition("/")[2]
