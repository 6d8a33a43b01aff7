"""Counting in torch's own allocators, by a small library in C that needs no headers of torch.

This module itself has the library's functions and structures. The library is compiled when the
package is installed, if a C compiler is available (Linux only). Each function is described where it
is defined, in ``csrc``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import struct
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_ssize_t,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from functools import cache
from importlib.util import find_spec
from typing import Any

SWITCH = "CKA_MEMORY_NATIVE"
"""Environment variable that turns native counting off if it is 0."""
MAX_FRAMES = 6
UNKNOWN = -1
"""A level that is not set, because it may have changed meanwhile."""
RECORDED_BLOCK = struct.Struct("<qIIIIIHH")
"""Of a recorded block: bytes, serial, begin, end, stack, count, on_host, inside."""
_REINSTALL = "reinstall pytest-cka-memory"
NOT_LIVE = 2**64 - 1
"""The serial number of an address where no block is live."""

__all__ = [
    "MAX_FRAMES",
    "NOT_LIVE",
    "RECORDED_BLOCK",
    "SWITCH",
    "UNKNOWN",
    "Block",
    "Figures",
    "Recorded",
    "byref",
    "functions",
    "objects_of_types",
    "why_missing",
]


class Block(Structure):
    """A live block, or a group of freed blocks that had the same stack."""

    _fields_ = (
        ("address", c_uint64),
        ("bytes", c_int64),
        ("serial", c_uint64),
        ("stack", c_uint32),
        ("count", c_uint32),
        ("freed", c_uint32),
        ("unused", c_uint32),
    )


class Recorded(Structure):
    """What a region has recorded; ``RECORDED_BLOCK`` is the layout of a block."""

    _fields_ = (
        ("blocks", c_void_p),
        ("count", c_uint32),
        ("events", c_uint32),
        ("peak_event", c_uint32),
        ("merged", c_uint32),
        ("lost", c_uint64),
        ("merged_bytes", c_int64),
        ("host_start_level", c_int64),
    )


class Figures(Structure):
    """The state of one device, and of one of its regions, at one moment."""

    _fields_ = (
        ("level", c_int64),
        ("reserved", c_int64),
        ("peak", c_int64),
        ("peak_reserved", c_int64),
        ("sample_peak", c_int64),
        ("serial", c_uint64),
        ("start_serial", c_uint64),
        ("start_level", c_int64),
        ("start_reserved", c_int64),
        ("lost", c_int64),
        ("collected", c_int64),
    )


_REGION = POINTER(c_void_p)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "counter_install": (c_int, []),
    "counter_is_intact": (c_int, []),
    "counter_add": (c_int, [c_uint64, c_int64, c_int, c_int]),
    "counter_remove": (None, [c_uint64, c_int]),
    "counter_inherit": (None, [c_uint64, c_int, c_uint64, c_int64]),
    "counter_set_level": (None, [c_int, c_int64, c_int64]),
    "counter_drops_workspaces": (None, [c_int]),
    "counter_serial_of": (c_uint64, [c_uint64, c_int]),
    "counter_origin_of": (c_uint64, [c_uint64, c_int, POINTER(c_int64)]),
    "counter_open_regions": (c_int, []),
    "counter_open": (c_int, [c_int, _REGION]),
    "counter_close": (None, [_REGION]),
    "counter_read": (c_int, [c_int, c_void_p, c_int, POINTER(Figures)]),
    "counter_retained": (c_int64, [c_int, c_uint64, POINTER(c_uint64)]),
    "counter_blocks": (c_uint64, [c_int, c_uint64, POINTER(Block), c_uint64]),
    "counter_at_peak": (c_uint64, [c_void_p, POINTER(Block), c_uint64]),
    "counter_at_peak_size": (c_uint64, [c_void_p]),
    "callers_in_backward": (c_uint64, [POINTER(c_uint64)]),
    "lent_add": (c_int, [c_uint64, c_int64, c_int]),
    "lent_remove": (None, [c_uint64, c_int64]),
    "lent_is_shared": (c_int, [c_uint64]),
    "objects_of_types": (py_object, [py_object, py_object, py_object]),
    "stacks_prepare": (c_int, []),
    "stacks_leave_out": (c_int, [c_char_p, c_int]),
    "stacks_read": (c_int, [c_uint32, POINTER(c_void_p), POINTER(c_int)]),
    "stacks_release": (None, []),
}
_OPTIONAL: dict[str, tuple[Any, list[Any]]] = {
    "stacks_note_modules": (c_int, [c_void_p, c_uint64]),
    "stacks_module": (c_uint64, [c_uint32, POINTER(c_uint32)]),
    "stacks_note_context": (c_int, [c_void_p, c_uint32]),
    "stacks_note_engine": (None, [c_void_p]),
    "stacks_note_own_pass": (None, [c_void_p]),
    "counter_live": (c_uint32, []),
    "counter_older": (c_uint64, [c_int, c_uint64, POINTER(Block), c_uint64]),
    "counter_counts_pinned": (c_int, []),
    "counter_block_at": (c_int64, [c_uint64, c_int, POINTER(c_uint64)]),
    "counter_collects": (None, [c_int]),
    "counter_knows_scratch": (c_int, []),
    "counter_without_scratch": (c_int64, [c_void_p]),
    "modules_path": (c_int, [c_uint64, c_char_p, c_int]),
    "counter_record": (c_int, [c_void_p, c_uint32]),
    "counter_recorded": (c_int, [c_void_p, POINTER(Recorded)]),
    "census_begin": (c_void_p, [c_int, c_int, c_int]),
    "census_end": (None, [c_void_p]),
    "census_advance": (c_int, [c_void_p]),
    "census_is_small": (c_int, [c_void_p, c_int]),
    "census_reach_back": (None, [c_void_p, c_void_p, c_int]),
    "census_unreachable": (c_int64, [c_void_p, c_int, py_object, c_void_p]),
    "census_forget": (None, [c_void_p]),
    "census_leave_out": (None, [py_object]),
    "collector_count": (c_void_p, [c_int, c_int, c_int]),
    "release_learn": (c_int, [py_object, c_void_p, c_int, c_int, c_int, c_int, py_object]),
    "release_learn_saved": (None, [c_int, py_object, py_object, py_object]),
    "release_begin": (c_void_p, [py_object, py_object, c_void_p, c_int, py_object, py_object]),
    "release_end": (None, [c_void_p]),
    "release_follow": (c_int, [c_void_p, py_object]),
    "release_is_freed": (c_int, [c_void_p, c_void_p]),
    "release_is_unused": (c_int, [c_void_p, c_void_p, c_int64, c_int]),
    "release_depth": (c_int, [c_void_p, c_void_p]),
    "release_note": (c_int, [c_void_p, py_object]),
    "release_free": (c_int, [c_void_p, c_void_p]),
    "release_lose": (c_int, [c_void_p, c_void_p]),
    "release_lose_in_cpp": (c_int, [c_void_p, py_object, c_ssize_t, c_int]),
    "release_waiting": (c_int, [c_void_p, py_object, py_object]),
    "release_left": (c_int64, [c_void_p, c_void_p]),
    "walk_begin": (c_void_p, [py_object]),
    "walk_end": (None, [c_void_p]),
    "walk_add_plain": (c_int, [c_void_p, c_void_p]),
    "walk_enter": (c_int64, [c_void_p, py_object, py_object]),
    "walk_follow": (c_int64, [c_void_p, c_size_t, c_size_t, py_object]),
    "walk_has": (c_int, [c_void_p, c_void_p]),
    "walk_met": (py_object, [c_void_p, c_size_t, c_size_t]),
    "walk_parents": (py_object, [c_void_p, c_size_t, c_size_t, py_object]),
    "walk_unmet": (py_object, [c_void_p, py_object, py_object]),
    "walk_unmet_referents": (py_object, [c_void_p, c_void_p]),
}
"""Functions that a library from an older checkout lacks; without them modules and kinds of memory
are not noted, pinned memory, scratch memory of kernels and what the garbage collector frees are not
counted, nothing is recorded, holders are searched for in Python, and garbage at batch boundaries is
collected."""


def objects_of_types(types: set[type]) -> list[Any]:
    """Return all objects of these types, without their subclasses, that the collector knows."""
    objects: list[Any] = functions().objects_of_types(gc.get_objects, (), tuple(types))
    return objects


def functions() -> Any:
    """Return the library; None if it cannot be used."""
    return _load()[0]


def why_missing() -> str | None:
    """Return why the library cannot or must not be used; None if it is used."""
    return f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else _load()[1]


@cache
def _load() -> tuple[Any, str | None]:
    """Return the library, or None and the reason."""
    spec = find_spec(f"{__package__}._counter")
    if spec is None or spec.origin is None:
        return None, "the native counter was not compiled for this system"
    try:
        # PyDLL: its functions take microseconds at most and never wait for the interpreter's lock.
        library = ctypes.PyDLL(spec.origin)
        optional = {name: kinds for name, kinds in _OPTIONAL.items() if hasattr(library, name)}
        for name, (result, arguments) in {**_FUNCTIONS, **optional}.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except OSError as error:
        # Without its folder, because reports may be public.
        why = str(error).removeprefix(f"{spec.origin}: ").replace(spec.origin, "the counter")
        return None, f"the native counter cannot be loaded ({why[:200]}); {_REINSTALL}"
    except AttributeError:
        return None, f"the native counter is of another version; {_REINSTALL}"
    if not library.stacks_prepare():
        return None, "the native counter does not find the functions of this Python"
    return library, None
