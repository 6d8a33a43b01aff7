"""Who is told about regions that have ended; pytest's plugin reports those of fixtures."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord

observers: "list[Callable[[Any, RegionRecord], None]]" = []
"""Called with a ``MemoryProbe`` without an explainer, and the record of its region that ended."""
