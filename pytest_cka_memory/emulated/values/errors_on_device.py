"""Errors that a card would report later, or not at all."""

from __future__ import annotations

import re

from pytest_cka_memory.errors import DeviceAssertError

_UNSUPPORTED = re.compile(
    r"not implemented for|not supported on CPU|Could not run|not support|only supported|"
    r"not been implemented|is not available for|unsupported|expected scalar type|"
    r"must have the same dtype|same dtype|to have the same dtype|not compiled with",
    re.IGNORECASE,
)
_VALUES = re.compile(
    r"out of (range|bounds)|index|invalid multinomial|probability|is invalid|nonzero value|"
    r"should be between 0 and 1|must be (>=|in the)|non-negative|negative|"
    r"expects all elements of|to be true, but got false",
    re.IGNORECASE,
)


def is_unsupported(error: Exception) -> bool:
    """Whether the CPU has no such operator for these types, though a card has."""
    if isinstance(error, NotImplementedError):
        return True
    return not isinstance(error, IndexError) and bool(_UNSUPPORTED.search(str(error)))


def is_assert(error: Exception) -> bool:
    """Whether an error is about a value, which a kernel would have refused."""
    return isinstance(error, IndexError) or bool(_VALUES.search(str(error)))


def device_assert(operator: str, error: Exception) -> DeviceAssertError:
    """Return the error for a value that a kernel would have refused."""
    why = str(error).rstrip(".")
    return DeviceAssertError(
        f"{operator}: {why}. On a card this is a device-side assert: the kernel reports it "
        f"later, at the next synchronization, and every call after that fails"
    )
