"""Every exception of the plugin, so that any module can raise one without importing another."""


class CkaMemoryError(Exception):
    """Base of all errors of this package."""


class SizeError(CkaMemoryError, ValueError):
    """A text or number that is no memory size."""


class LimitError(CkaMemoryError, ValueError):
    """A memory marker or limit with arguments it cannot have."""


class DeviceError(CkaMemoryError, RuntimeError):
    """A device that is unknown, missing, or keeps no memory counters."""


class RegionError(CkaMemoryError, RuntimeError):
    """A region used in a way its state does not allow, such as read before it ended."""


class ReportError(CkaMemoryError, RuntimeError):
    """A report file that cannot be read or written."""


class BaselineError(ReportError):
    """A baseline file that cannot be used; it is never written over."""


class RankError(CkaMemoryError, RuntimeError):
    """Ranks of one job that cannot reach one another."""


class PredictionError(CkaMemoryError, RuntimeError):
    """Something that only a real device can tell, such as a value that it computed."""


class CapacityError(CkaMemoryError, MemoryError):
    """A simulated card that is full; its argument is the bytes asked for."""
