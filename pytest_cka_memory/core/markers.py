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
        "at most `limit` MB (or a text such as '512 KiB') of what the measured code allocates may "
        "still be in use when it ends.",
        "retained_bytes",
    ),
    Marker(
        "zero_retention",
        "zero_retention",
        "nothing that the measured code allocates may still be in use when it ends.",
        "retained_bytes",
    ),
    Marker(
        "max_peak_mb",
        "max_peak_mb(512)",
        "the memory in use may rise at most `limit` MB above what was in use when the measured "
        "code began.",
        "peak_increase_bytes",
    ),
    Marker(
        "max_level_mb",
        "max_level_mb(1024)",
        "at no time may more than `limit` MB be in use, including what was in use when the "
        "measured code began.",
        "peak_bytes",
    ),
    Marker(
        "max_reserved_mb",
        "max_reserved_mb(1024)",
        "the memory that torch's allocator reserves may rise at most `limit` MB above what it had "
        "reserved when the measured code began.",
        "reserved_increase_bytes",
    ),
    Marker(
        "flat_per_batch",
        "flat_per_batch(tolerance_mb=0.0, warmup=1)",
        "after `warmup` batches, the memory in use may grow by at most `tolerance_mb` MB per "
        "batch; `of` limits another figure: 'reserved', what torch's allocator reserves; 'pools', "
        "what private pools of CUDA graphs and MemPool reserve; 'outside', the card's memory "
        "outside torch's allocator.",
    ),
    Marker(
        "no_cycles",
        "no_cycles",
        "the measured code may leave behind no memory that a reference cycle keeps alive and that "
        "only the garbage collector can free.",
        "cycle_bytes",
    ),
    Marker(
        "max_cycles_mb",
        "max_cycles_mb(1)",
        "the measured code may leave behind at most `limit` MB that reference cycles keep alive "
        "and that only the garbage collector can free.",
        "cycle_bytes",
    ),
    Marker(
        "max_process_mb",
        "max_process_mb(256)",
        "the memory of the process and its children may rise at most `limit` MB above what it was "
        "when the measured code began.",
        "process_increase_bytes",
    ),
    Marker(
        "flat_process_per_batch",
        "flat_process_per_batch(tolerance_mb=1.0, warmup=2)",
        "after `warmup` batches, the memory of the process and its children may grow steadily by "
        "at most `tolerance_mb` MB per batch.",
    ),
    Marker(
        "max_outside_mb",
        "max_outside_mb(64)",
        "the card's memory outside torch's allocator may rise at most `limit` MB above what it "
        "was when the measured code began.",
        "outside_increase_bytes",
    ),
    Marker(
        "max_pools_mb",
        "max_pools_mb(512)",
        "the memory that private pools of CUDA graphs and MemPool reserve may rise at most "
        "`limit` MB above what it was when the measured code began.",
        "pools_increase_bytes",
    ),
    Marker(
        "fits",
        'fits("t4", "a10")',
        "the peak must fit into the memory of each of the named `cards`, less 512 MB (or `beside` "
        "MB) for the CUDA context; if a device other than the card is measured, this is an "
        "estimate.",
    ),
    Marker(
        "peak_law",
        "peak_law(seq=1, batch=1)",
        "over all tests of a function that is parametrized by the sizes in `degrees`, the peak may "
        "grow no faster than each size to the power given for it; seq=2, for example, allows "
        "quadratic growth with the parameter seq.",
        builder="pytest_cka_memory.limits.laws:peak_law",
    ),
    Marker(
        "memory_baseline",
        'memory_baseline(tolerance="5%")',
        "no figure may exceed that of the committed baseline by more than `tolerance` or, with "
        "`relative_to`, that of the same test with that parameter id; `less_than`, `at_most` and "
        "`saves` compare only the figure named by `of` with the same figure of another parameter "
        "id.",
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
    "let this test pass if it allocates nothing on the measured accelerator; without this marker, "
    "a test whose markers limit the accelerator's memory fails if it allocates nothing there."
)

FIXTURE = "cka_memory"
"""The fixture; a test that uses it is measured, like one with a marker."""
SESSION_FIXTURE = "cka_memory_session"
"""The fixture for fixtures; a test that uses it is not measured for that."""
