"""The errors that this package raises."""

WITHOUT_VALUES = "compute no values (values=off, values=False or --no-values)"
"""What their texts advise where memory alone is of interest."""

LOAD_BEFORE = (
    "load the emulated device before any code asks torch for devices, and move calls to "
    "torch.cuda.is_available(), torch.cuda.device_count() and torch.accelerator from the top level "
    "of conftest.py, plugins and modules into functions"
)
"""What their texts advise if the process has looked for devices."""


class DeviceError(RuntimeError):
    """A device that cannot be emulated as asked for; the message says what to do."""


class TooLateError(DeviceError):
    """The process has looked for devices before, and keeps what it found."""


class StaleValueError(RuntimeError):
    """A read of a value that was not computed on the emulated device."""


class DeviceAssertError(IndexError, RuntimeError):
    """A value that a kernel on a card would refuse, such as an index out of range.

    On the CPU torch raises an IndexError or a RuntimeError for it, on a card a RuntimeError.
    """
