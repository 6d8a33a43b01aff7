"""The registry of markers: one row, one marker. Every session imports this, so it imports little.

A marker needs its row here; one that does not limit a figure to a number of bytes needs the
function that makes its limit as well.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Marker(NamedTuple):
    """What pytest, the plugin and error messages need to know about one marker."""

    name: str
    example: str
    """How a user writes it."""
    help: str
    """What ``pytest --markers`` prints."""
    figure: str = ""
    """The figure that it limits to a number of bytes; empty if its limit is of another kind."""
    builder: str = ""
    """``module:function`` that makes its limit; by default, the one of its name in ``limits``."""

    def build(self) -> Callable[..., Any]:
        """Import and return the function that makes a limit from the marker's arguments."""
        path = self.builder or f"pytest_cka_memory.limits:{self.name}"
        module, _, function = path.partition(":")
        builder: Callable[..., Any] = getattr(import_module(module), function)
        return builder


_ROWS = (
    Marker(
        "max_retained_mb",
        "max_retained_mb(1)",
        "at most `limit` MB, or a text such as '512 KiB', may be allocated in the region and "
        "still be live at its end.",
        "retained_bytes",
    ),
    Marker(
        "zero_retention",
        "zero_retention",
        "nothing that was allocated in the region may be live at its end.",
        "retained_bytes",
    ),
    Marker(
        "max_peak_mb",
        "max_peak_mb(512)",
        "the peak may rise at most `limit` MB above the level at entry.",
        "peak_increase_bytes",
    ),
    Marker(
        "max_level_mb",
        "max_level_mb(1024)",
        "the memory in use may be at most `limit` MB at any time, with what was in use before the "
        "region.",
        "peak_bytes",
    ),
    Marker(
        "max_reserved_mb",
        "max_reserved_mb(1024)",
        "the allocator's reserve may rise at most `limit` MB above its level at entry.",
        "reserved_increase_bytes",
    ),
    Marker(
        "flat_per_batch",
        "flat_per_batch(tolerance_mb=0.0, warmup=1)",
        "live memory may grow at most `tolerance_mb` MB per batch after `warmup` batches; `of` "
        "judges the reserve ('reserved'), the private pools of CUDA graphs and MemPool ('pools'), "
        "or the card's memory outside torch's allocator ('outside').",
    ),
    Marker(
        "no_cycles",
        "no_cycles",
        "nothing that was allocated in the region may be left to the garbage collector to free.",
        "cycle_bytes",
    ),
    Marker(
        "max_cycles_mb",
        "max_cycles_mb(1)",
        "at most `limit` MB that were allocated in the region may be left to the garbage collector "
        "to free.",
        "cycle_bytes",
    ),
    Marker(
        "max_process_mb",
        "max_process_mb(256)",
        "the memory of the process and its children may rise at most `limit` MB above that at "
        "entry.",
        "process_increase_bytes",
    ),
    Marker(
        "flat_process_per_batch",
        "flat_process_per_batch(tolerance_mb=1.0, warmup=2)",
        "the memory of the process and its children may grow steadily by at most `tolerance_mb` MB "
        "per batch after `warmup` batches.",
    ),
    Marker(
        "max_outside_mb",
        "max_outside_mb(64)",
        "the memory of the card outside torch's allocator may rise at most `limit` MB above that "
        "at entry.",
        "outside_increase_bytes",
    ),
    Marker(
        "max_pools_mb",
        "max_pools_mb(512)",
        "what private pools of CUDA graphs and MemPool reserve may rise at most `limit` MB above "
        "that at entry.",
        "pools_increase_bytes",
    ),
    Marker(
        "fits",
        'fits("t4", "a10")',
        "the peak must fit the memory of each of `cards`, of which 512 MB (or `beside` MB) are set "
        "aside for the CUDA context; if another device is measured, this is an estimate.",
    ),
    Marker(
        "peak_law",
        "peak_law(seq=1, batch=1)",
        "over all tests of a function that is parametrized by the sizes in `degrees`, the peak may "
        "grow with each size at most with the power that is written for it.",
        builder="pytest_cka_memory.limits.laws:peak_law",
    ),
    Marker(
        "memory_baseline",
        'memory_baseline(tolerance="5%")',
        "no figure may be more than `tolerance` above the committed baseline, or above the "
        "test with the parameter `relative_to`; `less_than`, `at_most` and `saves` compare "
        "the figure `of`.",
        builder="pytest_cka_memory.stored.baselines:tolerance_of_marker",
    ),
)
MARKERS: Mapping[str, Marker] = {marker.name: marker for marker in _ROWS}
"""The registry: name -> row, in the order in which limits are judged."""

RELATIONS = frozenset({"relative_to", "less_than", "at_most", "saves", "of"})
"""Arguments of ``memory_baseline`` that compare a test with another."""

NO_ALLOCATIONS = "allow_no_allocations"
"""A marker that is not a limit: it permits a test to allocate nothing on a measured accelerator."""
NO_ALLOCATIONS_HELP = (
    "the limits of this test hold even if the test allocates nothing on the measured accelerator."
)

FIXTURE = "cka_memory"
"""The fixture; a test that uses it is measured, like one with a marker."""
SESSION_FIXTURE = "cka_memory_session"
"""The fixture for fixtures; a test that uses it is not measured for that."""
