"""Memory regression tests for PyTorch: retained, growth per batch and peak, as pytest markers.

In tests, use the ``cka_memory`` fixture and the markers; anywhere else, :class:`MemoryProbe`.
Importing this package imports no torch: that waits until something is measured.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_cka_memory._version import __version__

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import Holding, RegionRecord
    from pytest_cka_memory.core.growth import Sample
    from pytest_cka_memory.errors import (
        CkaMemoryError,
        DeviceError,
        LimitError,
        RegionError,
        ReportError,
        SizeError,
    )
    from pytest_cka_memory.measure.probe import MemoryProbe, Snapshot, Sweep
    from pytest_cka_memory.measure.region import Region
    from pytest_cka_memory.notebook import measure_memory_at_batch_counts, measure_memory_retention

__all__ = [
    "CkaMemoryError",
    "DeviceError",
    "Holding",
    "LimitError",
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
    "measure_memory_at_batch_counts",
    "measure_memory_retention",
]

_HOMES = {
    "CkaMemoryError": "errors",
    "DeviceError": "errors",
    "Holding": "core.figures",
    "LimitError": "errors",
    "MemoryProbe": "measure.probe",
    "Region": "measure.region",
    "RegionError": "errors",
    "RegionRecord": "core.figures",
    "ReportError": "errors",
    "Sample": "core.growth",
    "SizeError": "errors",
    "Snapshot": "measure.probe",
    "Sweep": "measure.probe",
    "measure_memory_at_batch_counts": "notebook",
    "measure_memory_retention": "notebook",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: pytest imports this package in every session of whoever installed it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
