"""Run torch's own CUDA operator, which allocates and does not change device memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from emulated_cuda.torch_versions import REFUSED

Kernel = Callable[..., Any]
OUTSIDE, OPERATOR, COPY = 0, 1, 2  # Phase in csrc/emulated.hpp


class _Thread(threading.local):
    """The operator that runs in a thread: its arguments, or None."""

    arguments: tuple[Any, ...] | None = None
    checks_pass = False
    """Whether a truth value that the operator reads back is a check, true if it may go on."""
    has_checked = False
    """Whether the operator that runs, or ran last, has read back such a check."""


thread = _Thread()


class Unavailable(Exception):  # noqa: N818  never leaves this package
    """The library has no emulation of what the operator calls, such as cuSOLVER."""


class Library:
    """The functions of csrc/values.cpp; each call takes less than a microsecond."""

    def __init__(self, path: str) -> None:
        functions = ctypes.PyDLL(path)  # keeps the interpreter's lock
        self.set_phase = functions.emulated_set_phase
        self.compute_values = functions.emulated_compute_values
        self.announce = functions.emulated_announce
        self.announce.argtypes = (ctypes.c_int64,)
        self.forget_answers = functions.emulated_forget_answers
        self.zero = functions.emulated_zero
        self.zero.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        functions.emulated_unknown_work.restype = ctypes.POINTER(ctypes.c_uint64)
        self.unknown_work = functions.emulated_unknown_work().contents
        self._unknown_name = functions.emulated_unknown_name
        self._unknown_name.argtypes = (ctypes.c_char_p, ctypes.c_size_t)

    def unknown_name(self) -> str:
        """Return the name of the last kernel that ran outside of any operator."""
        text = ctypes.create_string_buffer(512)
        self._unknown_name(text, len(text))
        return text.value.decode(errors="replace")


_library: Library | None = None


def use_library(library: Library) -> None:
    """Use these functions from now on."""
    global _library
    _library = library


def library() -> Library:
    """Return the functions of the loaded library."""
    assert _library is not None
    return _library


def run(
    original: Kernel,
    keyset: Any,
    args: Any,
    kwargs: Any,
    phase: int = OPERATOR,
    *,
    checks_pass: bool = False,
) -> Any:
    """Run torch's kernel in this thread without changing what its arguments contain.

    Args:
        original: the kernel.
        keyset: what it gets from the dispatcher, before the arguments.
        args: its positional arguments.
        kwargs: its other arguments.
        phase: what its copies and reads do.
        checks_pass: answer the checks of its arguments that it reads back with true.

    Raises:
        Unavailable: if it calls a library that is not emulated.
    """
    assert _library is not None
    thread.arguments = args
    thread.checks_pass = checks_pass
    thread.has_checked = False
    _library.set_phase(phase)
    try:
        return original(keyset, *args, **kwargs)
    except RuntimeError as error:
        if not REFUSED.value.search(str(error)):
            raise
        raise Unavailable(str(error)) from None
    finally:
        _library.set_phase(OUTSIDE)
        thread.arguments = None


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in arguments or results of an operator."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def is_argument_of_running(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` is that of an argument, so that its values are known."""
    if thread.arguments is None:
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(
        argument.untyped_storage().data_ptr() == address
        for argument in tensors_in(thread.arguments)
        if argument.layout is torch.strided
    )
