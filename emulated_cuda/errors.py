"""The errors that this package raises."""

WITHOUT_VALUES = "switch values off (values=off, values=False or --no-values)"
"""What their texts advise where memory alone is of interest."""


class DeviceError(RuntimeError):
    """A device that cannot be emulated as asked for; the message says what to do."""


class TooLateError(DeviceError):
    """Torch has looked for devices before, and found none."""


class StaleValueError(RuntimeError):
    """A read of a value that was not computed on the emulated device."""


class DeviceAssertError(IndexError, RuntimeError):
    """A value that a kernel on a card would refuse, such as an index out of range.

    On the CPU torch raises an IndexError or a RuntimeError for it, on a card a RuntimeError.
    """
