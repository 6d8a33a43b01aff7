"""The stacks that the native counter has noted: their frames, module and context."""

import ctypes
import sys
import sysconfig
from functools import cache

import torch

from pytest_cka_memory.core.allocations import Context, FramesSite, RawFrames, SharedFramesSite
from pytest_cka_memory.meters.blocks import contexts, library

_LONGEST_PATH = 512


def frames_of(stack: int) -> RawFrames:
    """Return the frames of a stack as pairs of code and last instruction, innermost first."""
    codes = (ctypes.c_void_p * library.MAX_FRAMES)()
    last = (ctypes.c_int * library.MAX_FRAMES)()
    count = library.functions().stacks_read(stack, codes, last)
    return tuple(
        (ctypes.cast(codes[number] or 0, ctypes.py_object).value, last[number])
        for number in range(count)
    )


def site_of(stack: int) -> FramesSite | None:
    """Return where the memory of a stack was allocated; None if no frame was noted."""
    frames = frames_of(stack)
    module = _module_of(stack)[0] if notes_modules() else 0
    return SharedFramesSite(frames, module) if frames else None


def _module_of(stack: int) -> tuple[int, int]:
    """Return the identity of the innermost module that was running, and the context; 0 if none."""
    context = ctypes.c_uint32()
    return library.functions().stacks_module(stack, ctypes.byref(context)), context.value


def context_of(stack: int) -> Context | None:
    """Return in which context a stack was noted; None if contexts are not."""
    return Context(_module_of(stack)[1]) if contexts.are_noted() else None


@cache
def notes_modules() -> bool:
    """Note the innermost running module of each stack, if the layout of frames here is known."""
    functions = library.functions()
    is_known = (3, 10) <= sys.version_info < (3, 15) and sys.implementation.name == "cpython"
    if not is_known or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    if not hasattr(functions, "stacks_note_modules"):
        return False

    def trial(first: object) -> bool:
        code = torch.nn.Module.__call__.__code__
        return bool(functions.stacks_note_modules(id(code), id(first)))

    return trial(object())


def module_path(module: int) -> str:
    """Return the path in its network of a module that was noted; empty if none was."""
    path = ctypes.create_string_buffer(_LONGEST_PATH)
    library.functions().modules_path(module, path, _LONGEST_PATH)
    return path.value.decode(errors="replace")
