"""Memory regression tests for PyTorch: limits on retained, growing and peak memory as markers.

In tests, use the ``cka_memory`` fixture and the markers; elsewhere, use :class:`MemoryProbe`.
Importing this package does not import torch; that happens when something is measured.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_cka_memory._version import __version__

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord
    from pytest_cka_memory.core.retention import Holding, Sample
    from pytest_cka_memory.errors import (
        CkaMemoryError,
        DeviceError,
        LimitError,
        LimitWarning,
        RegionError,
        ReportError,
        SizeError,
    )
    from pytest_cka_memory.laws.law import Law
    from pytest_cka_memory.measure.probe import MemoryProbe, Snapshot
    from pytest_cka_memory.measure.region import Region
    from pytest_cka_memory.measure.repeated_runs import Sweep
    from pytest_cka_memory.notebook import (
        law,
        measure_memory_at_batch_counts,
        measure_memory_retention,
    )

__all__ = [
    "CkaMemoryError",
    "DeviceError",
    "Holding",
    "Law",
    "LimitError",
    "LimitWarning",
    "MemoryProbe",
    "Region",
    "RegionError",
    "RegionRecord",
    "ReportError",
    "Sample",
    "SizeError",
    "Snapshot",
    "Sweep",
    "__version__",
    "law",
    "measure_memory_at_batch_counts",
    "measure_memory_retention",
]

_MODULES = {
    "CkaMemoryError": "errors",
    "DeviceError": "errors",
    "Holding": "core.retention",
    "Law": "laws.law",
    "LimitError": "errors",
    "LimitWarning": "errors",
    "MemoryProbe": "measure.probe",
    "Region": "measure.region",
    "RegionError": "errors",
    "RegionRecord": "core.figures",
    "ReportError": "errors",
    "Sample": "core.retention",
    "SizeError": "errors",
    "Snapshot": "measure.probe",
    "Sweep": "measure.repeated_runs",
    "law": "notebook",
    "measure_memory_at_batch_counts": "notebook",
    "measure_memory_retention": "notebook",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: pytest imports this package in every session if it is installed.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
