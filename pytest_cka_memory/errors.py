"""Every exception of the plugin."""


class CkaMemoryError(Exception):
    """Base of all errors of this package."""


class SizeError(CkaMemoryError, ValueError):
    """A value that is not a valid memory size."""


class LimitError(CkaMemoryError, ValueError):
    """A memory marker or limit with invalid arguments."""


class DeviceError(CkaMemoryError, RuntimeError):
    """A device that is unknown, not available, or has no memory counters."""


class RegionError(CkaMemoryError, RuntimeError):
    """A region used in the wrong state, for example read before it has ended."""


class MissingPackageError(CkaMemoryError, ImportError):
    """An optional package that is needed and not installed."""


class LimitWarning(CkaMemoryError, UserWarning):  # noqa: N818 - a warning, not an error
    """A broken limit that is only a warning: ``warn=True`` or ``--cka-memory-mode=warn``."""


class ReportError(CkaMemoryError, RuntimeError):
    """A report file that cannot be read or written."""


class BaselineError(ReportError):
    """A baseline file that cannot be used; it is never overwritten."""


class RankError(CkaMemoryError, RuntimeError):
    """Ranks of one job that cannot communicate."""
