"""Let Python exceptions leave a backward pass on a device that is registered from Python.

While an exception propagates, torch asks such a device's guard for its type, in C++ code that must
not throw. No Python function can be called while an exception is set, so the process would abort
("terminate called without an active exception"). The guard therefore fetches and keeps the
exception, and it is raised again when the backward pass returns. Delete this when torch does so.
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
_kept_errors: list[BaseException] = []
_TYPE = DeviceType.PrivateUse1


class Guard(DeviceGuard):
    """A device guard whose type can be read while an exception is set.

    It has no attributes of its own: until the exception is fetched, every attribute lookup fails
    that does not succeed at once.
    """

    def type_(self, fetch: Any = _FETCH, parts: Any = _REFERENCES) -> Any:
        fetch(*parts)
        if _PARTS[1].value is not None:
            _keep_error()
        return _TYPE


def _keep_error() -> None:
    _NORMALIZE(*_REFERENCES)
    _kept_errors.append(ctypes.cast(_PARTS[1], ctypes.py_object).value)


def install() -> None:
    """Have every backward pass raise the exception that the guard kept, if any."""
    set_run_backward(_raising_kept_error(run_backward))


def _raising_kept_error(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward_and_raise(*args: Any, **kwargs: Any) -> Any:
        _kept_errors.clear()
        try:
            return run(*args, **kwargs)
        except SystemError:  # raised by Python for a failed call without an exception
            if not _kept_errors:
                raise
            error = _kept_errors[0]
        finally:
            _kept_errors.clear()
        raise error

    return run_backward_and_raise
