"""Errors that a card would report later, or not at all."""

from __future__ import annotations

from emulated_cuda.errors import DeviceAssertError
from emulated_cuda.torch_versions import ABOUT_VALUES, UNSUPPORTED


def is_unsupported(error: Exception) -> bool:
    """Whether the CPU has no such operator for these types, though a card has."""
    if isinstance(error, NotImplementedError):
        return True
    return not isinstance(error, IndexError) and bool(UNSUPPORTED.value.search(str(error)))


def is_assert(error: Exception) -> bool:
    """Whether an error is about a value, which a kernel would have refused."""
    return isinstance(error, IndexError) or bool(ABOUT_VALUES.value.search(str(error)))


def device_assert(operator: str, error: Exception) -> DeviceAssertError:
    """Return the error for a value that a kernel would have refused."""
    why = str(error).rstrip(".")
    return DeviceAssertError(
        f"{operator}: {why}. On a card this is a device-side assert: the kernel reports it "
        f"later, at the next synchronization, and every call after that fails"
    )
