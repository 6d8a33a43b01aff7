"""Memory regression tests for PyTorch: retained, growth per batch and peak, as pytest markers.

In tests, use the ``cka_memory`` fixture and the markers; anywhere else, :class:`MemoryProbe`.
Importing this package imports no torch: that waits until something is measured.
"""

from pytest_cka_memory._version import __version__
from pytest_cka_memory.errors import (
    CkaMemoryError,
    DeviceError,
    LimitError,
    RegionError,
    ReportError,
    SizeError,
)
from pytest_cka_memory.notebook import measure_memory_at_batch_counts, measure_memory_retention
from pytest_cka_memory.open_region import Region
from pytest_cka_memory.probe import MemoryProbe, Snapshot, Sweep
from pytest_cka_memory.region import Holding, RegionRecord
from pytest_cka_memory.timeline import Sample

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
