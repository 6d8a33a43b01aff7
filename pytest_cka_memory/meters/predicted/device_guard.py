"""Brings Python's exceptions out of a backward pass on a device that is set up from Python.

On the way out torch asks such a device for its type, in C++ code that may not fail. But no Python
function can be called while an exception is on its way: the process would end, without a word
("terminate called without an active exception"). So the exception is put aside there, and raised
again where the backward pass ends. Delete this when torch clears it itself.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from pytest_cka_memory.meters.torch_private import (
    DeviceGuard,
    DeviceType,
    run_backward,
    set_run_backward,
)

_PARTS = tuple(ctypes.c_void_p() for _ in range(3))
_REFERENCES = tuple(map(ctypes.byref, _PARTS))
_FETCH = ctypes.pythonapi.PyErr_Fetch
_NORMALIZE = ctypes.pythonapi.PyErr_NormalizeException
_FETCH.restype = _NORMALIZE.restype = None
_aside: list[BaseException] = []
_TYPE = DeviceType.PrivateUse1


class Guard(DeviceGuard):
    """A device guard that can be asked for its type at any moment. Has no attributes of its own:
    until the exception is aside, whatever is looked up and is not there at once counts as missing.
    """

    def type_(self, fetch: Any = _FETCH, parts: Any = _REFERENCES) -> Any:
        fetch(*parts)
        if _PARTS[1].value is not None:
            _put_aside()
        return _TYPE


def _put_aside() -> None:
    _NORMALIZE(*_REFERENCES)
    _aside.append(ctypes.cast(_PARTS[1], ctypes.py_object).value)


def install() -> None:
    """Raise what was put aside as soon as the backward pass that raised it has ended."""
    set_run_backward(_raising(run_backward))


def _raising(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward_and_raise(*args: Any, **kwargs: Any) -> Any:
        _aside.clear()
        try:
            return run(*args, **kwargs)
        except SystemError:  # what Python says of an error without an exception
            if not _aside:
                raise
            error = _aside[0]
        finally:
            _aside.clear()
        raise error

    return run_backward_and_raise
