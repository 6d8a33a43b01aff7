"""Who is told about regions that have ended; pytest's plugin reports those of fixtures."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord
    from pytest_cka_memory.measure.probe import MemoryProbe

observers: "list[Callable[[MemoryProbe, RegionRecord], None]]" = []
"""Called with every region that has ended of a probe without an explainer."""
