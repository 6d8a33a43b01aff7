"""The row of a figure, and the figures that are measured only for regions that ask for them."""

from dataclasses import dataclass
from typing import Annotated, Any

from pytest_cka_memory.core.reserve import POOLS_ADVICE
from pytest_cka_memory.core.retention import Holding, ProcessSample, ProcessUse, steady_growth


@dataclass(frozen=True)
class Figure:
    """What the reports need to know about one figure of a region."""

    noun: str
    """Its name in messages: ``peak increase``."""
    description: str
    """One sentence for the JSON schema."""
    column: str = ""
    """Its heading in tables; empty if tables do not show it."""
    legend: str = ""
    """What the column means, in a few words."""
    position: int = 0
    """Its place among the columns of tables and the figures of baselines, from left to right."""
    importance: int = 0
    """How long its column stays in a table that is too wide: the lowest are left out first."""
    shown_as: str = ""
    """The figure whose column shows it, if it has none of its own."""
    only_if_known: bool = False
    """Whether tables drop its column if no region has a value."""
    only_if_not_zero: bool = False
    """Whether tables drop its column if no region has a value other than 0."""
    never_negative: bool = False
    in_baselines: bool = False
    """Whether baselines keep it and comparisons look at it."""
    advice_if_at_entry: str = ""
    """What to do if more of it was live at entry than was allocated in the region."""
    explained_by: str = ""
    """The field of the record that lists the storages whose bytes it counts; empty if none does."""
    judged_as: str = ""
    """The figure that a limit judges in its place; empty if it is judged itself, or never."""
    above_entry: bool = False
    """Whether it is a level above that at entry, so that a chart of levels can show its limit."""
    advice: str = ""
    """What to do when it is too high and nothing more specific is known."""
    unknown_because: str = "this device has no reserve"
    """Why it may be None, for limits that cannot be judged then."""
    measured_by: str = ""
    """Which of the additions measures it, that are made only if they are asked for."""
    of_device: bool = True
    """Whether it is about memory of the measured device: a test that forgets to use the device
    keeps every limit on it."""
    depends_on: tuple[str, ...] = ()
    """The facts it depends on besides the device and versions, as in ``conditions.FACTS``."""
    in_place_of: str = ""
    """The figure in whose place it is compared if that one depends on a fact that has changed."""
    includes: str = ""
    """A figure whose bytes it includes, so that it is too high if that one is; empty if none."""
    name: str = ""
    """Its attribute of the record, filled in by the registry."""
    optional: bool = False
    """Whether it can be None, filled in by the registry."""

    def shown_value(self, record: Any) -> Any:
        """Return its value as tables show it: None if a column that is rarely shown has nothing."""
        value = getattr(record, self.name)
        return None if self.only_if_not_zero and value == 0 else value

    @property
    def mb_name(self) -> str:
        """Name of the same figure in MB; the same name if it does not count bytes."""
        return self.name.replace("_bytes", "_mb")

    def advice_for(self, record: Any) -> str:
        """Return what to do if it is too high in `record`; empty if there is no advice."""
        at_entry = record.start_bytes > record.peak_increase_bytes
        return self.advice_if_at_entry if at_entry and self.advice_if_at_entry else self.advice


CYCLES = "cycles"
"""Memory that only the garbage collector frees."""
PROCESS = "process"
"""Memory of the process and its children."""
DRIVER = "driver"
"""Memory of the card as its driver counts it."""
POOLS = "pools"
"""Memory in the private pools of the allocator: those of CUDA graphs, and ``MemPool``."""
TIMELINE = "timeline"
"""Each allocation and release, for a picture. It is not a figure."""
MOMENTS = "moments"
"""The level at each allocation, for the law of a peak. It is not a figure."""
OUTSIDE_ADVICE = (
    "run nvidia-smi to see the processes that use the card; this is memory of the CUDA "
    "context, NCCL, other libraries or other processes"
)
NO_POOLS = "this device has no private pools, or no snapshot of them"
_NOT_MEASURED = "the figure was not measured, because an exception ended the region"
NOT_OF_DEVICE = frozenset({PROCESS})
"""Additions whose figures count something else than memory of the measured device."""
ADDITIONS = {
    CYCLES: "memory that only the garbage collector frees",
    PROCESS: "memory of the process and its children",
    DRIVER: (
        "memory in use on the card as its driver counts it, including memory outside torch's "
        "allocator"
    ),
    POOLS: "memory in the allocator's private pools, which CUDA graphs and torch.cuda.MemPool use",
}
"""What can be measured in addition -> what it is, in a few words."""


@dataclass(frozen=True, kw_only=True)
class AdditionalFigures:
    """Figures of a region that are None, or empty, unless they were asked for."""

    cycle_bytes: Annotated[
        int | None,
        Figure(
            "memory in reference cycles",
            "Allocated inside the region and freed only by the garbage collector, in the region or "
            "at its end; null unless it was asked for.",
            column="cycles",
            legend="freed only by the garbage collector",
            position=10,
            importance=5,
            only_if_known=True,
            never_negative=True,
            explained_by="cycles",
            above_entry=True,
            measured_by=CYCLES,
            unknown_because="what the garbage collector frees is not counted on this device",
        ),
    ] = None
    cycles: tuple[Holding, ...] = ()
    """What ``cycle_bytes`` counts, and the reference cycles that have kept it alive."""
    process_start_bytes: Annotated[
        int | None,
        Figure(
            "memory of the process at entry",
            "Of the process and its children at entry; null, like the other figures of the "
            "process, unless it was asked for.",
            never_negative=True,
            measured_by=PROCESS,
            of_device=False,
        ),
    ] = None
    process_peak_bytes: Annotated[
        int | None,
        Figure(
            "highest memory of the process",
            "Of the process and its children: highest at entry, batch boundaries and exit.",
            never_negative=True,
            measured_by=PROCESS,
            of_device=False,
            judged_as="process_increase_bytes",
        ),
    ] = None
    process_end_bytes: Annotated[
        int | None,
        Figure(
            "memory of the process at exit",
            "Of the process and its children when the region's code ended, before cleaning.",
            never_negative=True,
            measured_by=PROCESS,
            of_device=False,
        ),
    ] = None
    process_torch_bytes: Annotated[
        int | None,
        Figure(
            "rise of torch's CPU allocator",
            "Of torch's CPU allocator: level when the region's code ended minus level at entry; "
            "null if it is not counted.",
            measured_by=PROCESS,
            of_device=False,
        ),
    ] = None
    process_timeline: tuple[ProcessSample, ...] = ()
    """Memory of the process and its children at batch boundaries, 128 at most."""
    processes: tuple[ProcessUse, ...] = ()
    """The process, its children and what each of them needed."""
    growing_graph: str | None = None
    """A tensor whose autograd graph had nodes of every batch, and what to do. It is looked for
    if the process grows."""
    memory_timeline: dict[str, Any] | None = None
    """The data of a picture of memory over time, see :mod:`.memory_timeline`; None unless it was
    asked for and the device's allocations are recorded. It is not in the JSON report."""
    moments: dict[str, Any] | None = None
    """The level at each allocation by line, see :class:`.laws.RecordedSample`; None unless
    ``peak_law`` judges the test. It is not in the JSON report."""
    law: dict[str, Any] | None = None
    """How a figure of the measured code grows with sizes, see :func:`.limits.laws.to_dict`; None
    unless the region is one of ``cka_memory.law``."""
    driver_start_bytes: Annotated[
        int | None,
        Figure(
            "memory of the card at entry",
            "In use on the card at entry, by any process, as its driver counts; null, like the "
            "other figures of the driver, unless it was asked for and the device has a driver.",
            never_negative=True,
            measured_by=DRIVER,
        ),
    ] = None
    driver_peak_bytes: Annotated[
        int | None,
        Figure(
            "highest memory of the card",
            "In use on the card: highest at entry, batch boundaries and exit.",
            never_negative=True,
            measured_by=DRIVER,
        ),
    ] = None
    driver_end_bytes: Annotated[
        int | None,
        Figure(
            "memory of the card at exit",
            "In use on the card when the region's code ended, before cleaning.",
            never_negative=True,
            measured_by=DRIVER,
        ),
    ] = None
    outside_start_bytes: Annotated[
        int | None,
        Figure(
            "memory outside torch's allocator at entry",
            "In use on the card at entry, but not in the reserve of this process's allocator.",
            measured_by=DRIVER,
        ),
    ] = None
    outside_peak_bytes: Annotated[
        int | None,
        Figure(
            "highest memory outside torch's allocator",
            "The same, highest at entry, batch boundaries and exit.",
            measured_by=DRIVER,
            judged_as="outside_increase_bytes",
        ),
    ] = None
    pools_start_bytes: Annotated[
        int | None,
        Figure(
            "reserve of private pools at entry",
            "Reserved at entry by pools of CUDA graphs and MemPool; null, like the other figures "
            "of pools, unless it was asked for and the device has a snapshot.",
            never_negative=True,
            measured_by=POOLS,
        ),
    ] = None
    pools_bytes: Annotated[
        int | None,
        Figure(
            "in use in private pools",
            "In use in these pools: highest at entry, ends of captures, batch boundaries and exit.",
            never_negative=True,
            measured_by=POOLS,
        ),
    ] = None
    pools_reserved_bytes: Annotated[
        int | None,
        Figure(
            "reserve of private pools",
            "Reserved by these pools, highest at the same moments.",
            never_negative=True,
            measured_by=POOLS,
            judged_as="pools_increase_bytes",
        ),
    ] = None
    pools: tuple[Holding, ...] = ()
    """What ``pools_reserved_bytes`` counts, by the graph or ``MemPool`` that owns it."""

    @property
    def process_increase_bytes(
        self,
    ) -> Annotated[
        int | None,
        Figure(
            "rise of the process's memory",
            "process_peak_bytes minus process_start_bytes.",
            column="process",
            legend="rise of the memory of the process and its children, seen between batches",
            position=11,
            importance=5,
            only_if_known=True,
            never_negative=True,
            explained_by="retained",
            measured_by=PROCESS,
            of_device=False,
            unknown_because=_NOT_MEASURED,
        ),
    ]:
        """Highest memory of the process and its children above that at entry."""
        if self.process_peak_bytes is None or self.process_start_bytes is None:
            return None
        return self.process_peak_bytes - self.process_start_bytes

    @property
    def process_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth of the process per batch",
            "Steady growth of the memory of the process and its children per batch; null with "
            "fewer than ten batches.",
            column="process/b",
            legend="its steady growth per batch, from 10 batches on",
            position=12,
            importance=5,
            only_if_known=True,
            never_negative=True,
            explained_by="retained",
            measured_by=PROCESS,
            of_device=False,
        ),
    ]:
        """Steady growth per batch; see :func:`pytest_cka_memory.core.retention.steady_growth`."""
        return steady_growth(self.process_timeline) if self.process_timeline else None

    @property
    def outside_increase_bytes(
        self,
    ) -> Annotated[
        int | None,
        Figure(
            "rise outside torch's allocator",
            "outside_peak_bytes minus outside_start_bytes.",
            column="outside",
            legend="rise of the card's memory outside torch's allocator, seen between batches",
            position=13,
            importance=5,
            only_if_known=True,
            never_negative=True,
            measured_by=DRIVER,
            unknown_because="this device has no driver that counts its memory",
            advice=OUTSIDE_ADVICE,
        ),
    ]:
        """Highest memory outside torch's allocator above that at entry; None if unknown."""
        if self.outside_peak_bytes is None or self.outside_start_bytes is None:
            return None
        return self.outside_peak_bytes - self.outside_start_bytes

    @property
    def pools_increase_bytes(
        self,
    ) -> Annotated[
        int | None,
        Figure(
            "rise of private pools",
            "pools_reserved_bytes minus pools_start_bytes.",
            column="pools",
            legend="rise of what private pools reserve, seen between batches and captures",
            position=15,
            importance=5,
            only_if_known=True,
            never_negative=True,
            explained_by="pools",
            measured_by=POOLS,
            unknown_because=NO_POOLS,
            advice=POOLS_ADVICE,
        ),
    ]:
        """Highest reserve of private pools above that at entry; None if unknown."""
        if self.pools_reserved_bytes is None or self.pools_start_bytes is None:
            return None
        return self.pools_reserved_bytes - self.pools_start_bytes
