"""The record of one region, and the registry of its figures: one row, one figure.

A row is the annotation of a figure in :class:`RegionRecord`. Table columns, the JSON schema, the
``*_mb`` attributes and ``dir()`` of a region, baselines, comparisons, JUnit properties and the
advice in failure messages all follow from it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

from pytest_cka_memory.core.conditions import OF_OPERATORS, OF_SCRATCH
from pytest_cka_memory.core.decoder import decode
from pytest_cka_memory.core.figure_rows import AdditionalFigures, Figure
from pytest_cka_memory.core.record_parts import BatchFigures, ReserveFigures
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.units import MB

_SEE = (
    "pass --cka-memory-html=memory.html --cka-memory-timeline to see when each group of tensors "
    "was live"
)


@dataclass(frozen=True, kw_only=True)
class RegionRecord(BatchFigures, ReserveFigures, AdditionalFigures):
    """What was measured between a region's entry and its exit; in bytes unless noted."""

    label: str
    """As the user named it; empty for a whole test."""
    completed: bool
    """False if an exception ended the region: its traceback holds tensors, so it is not judged."""
    start_bytes: Annotated[
        int,
        Figure(
            "level at entry",
            "Live at entry, after cleaning.",
            column="start",
            legend="in use when the region began",
            position=2,
            importance=1,
            never_negative=True,
        ),
    ]
    end_bytes: Annotated[
        int,
        Figure(
            "level at exit",
            "Live at exit, after cleaning.",
            never_negative=True,
            judged_as="retained_bytes",
        ),
    ]
    peak_bytes: Annotated[
        int,
        Figure(
            "peak",
            "Highest live level inside the region, including what was live before.",
            column="peak",
            legend="most memory in use at once",
            position=3,
            importance=4,
            never_negative=True,
            explained_by="at_peak",
            judged_as="peak_increase_bytes",
            advice=f"{_SEE}; the region allocates most of the peak",
            advice_if_at_entry="free what earlier code and fixtures left in use, or use smaller "
            "models and data; most of the peak was in use before the region",
        ),
    ]
    peak_without_scratch_bytes: Annotated[
        int | None,
        Figure(
            "peak without scratch memory",
            "Highest live level inside the region without what operators of torch allocate and "
            "free themselves, which depends on the processor and the number of threads; null if "
            "the meter cannot tell it apart.",
            never_negative=True,
            judged_as="increase_without_scratch_bytes",
        ),
    ] = None
    retained_bytes: Annotated[
        int,
        Figure(
            "retained",
            "Allocated inside the region and still live at its exit.",
            column="retained",
            legend="allocated inside and still live at the end",
            position=5,
            importance=7,
            never_negative=True,
            in_baselines=True,
            explained_by="retained",
            above_entry=True,
            advice="remove each from what holds it, or keep a number computed from it instead",
        ),
    ]
    garbage_at_peak_bytes: Annotated[
        int | None,
        Figure(
            "garbage at the peak",
            "How much of peak_bytes was garbage in reference cycles, which the collector had not "
            "freed: at least this, because it is looked for at batch boundaries; null without "
            "them, and if it cannot be counted.",
            never_negative=True,
        ),
    ] = None
    garbage_end_bytes: Annotated[
        int | None,
        Figure(
            "garbage at exit",
            "Live when the region's code ended, and garbage in reference cycles: freed by the "
            "collection at the end of the region.",
            never_negative=True,
        ),
    ] = None
    one_time_bytes: Annotated[
        int | None,
        Figure(
            "one-time allocations",
            "Allocated by a first run only, such as library workspaces; null if not determined.",
        ),
    ] = None
    host_retained_bytes: Annotated[
        int | None,
        Figure(
            "retained on the host",
            "Of tensors on the host while another device is measured: allocated inside the region "
            "and still live at its exit. No limit judges it; null if the host was not counted.",
            column="host",
            legend="retained by tensors on the host, which no limit judges",
            position=9,
            importance=4,
            only_if_not_zero=True,
            of_device=False,
            explained_by="host_retained",
        ),
    ] = None
    garbage_left: bool = False
    """Whether its figures may include garbage in reference cycles, because collecting it would have
    taken too long. Only for whole tests without limits: then retained_bytes is an upper bound."""
    garbage_freed: bool = False
    """Whether garbage was freed at batch boundaries because its memory cannot all be counted: peaks
    and levels may then be higher without the plugin."""
    retained: tuple[Holding, ...] = ()
    """What ``retained_bytes`` counts and what references it; searched for if a limit broke."""
    grown: tuple[Holding, ...] = ()
    """What was allocated and kept in several batches; searched for if a growth limit broke."""
    at_peak: tuple[Holding, ...] = ()
    """What was live at the peak, by the line that allocated it; listed if a peak limit broke."""
    host_retained: tuple[Holding, ...] = ()
    """What ``host_retained_bytes`` counts and what references it; searched for if a limit broke."""

    garbage: tuple[Holding, ...] = ()
    """Tensors that were garbage in reference cycles at a batch boundary or at exit, and the cycles;
    described if there are limits."""

    @property
    def peak_increase_bytes(
        self,
    ) -> Annotated[
        int,
        Figure(
            "peak increase",
            "peak_bytes minus start_bytes.",
            column="increase",
            legend="peak - start",
            position=4,
            importance=6,
            in_baselines=True,
            depends_on=OF_SCRATCH,
            explained_by="at_peak",
            above_entry=True,
            advice=_SEE,
        ),
    ]:
        """Peak above the level at entry."""
        return self.peak_bytes - self.start_bytes

    @property
    def increase_without_scratch_bytes(
        self,
    ) -> Annotated[
        int | None,
        Figure(
            "peak increase without scratch memory",
            "peak_without_scratch_bytes minus start_bytes: the same on every processor and with "
            "every number of threads.",
            position=4,
            in_baselines=True,
            never_negative=True,
            depends_on=OF_OPERATORS,
            in_place_of="peak_increase_bytes",
            explained_by="at_peak",
            advice=_SEE,
        ),
    ]:
        """Peak above the level at entry, without what operators allocate and free themselves.

        None if the meter cannot tell it apart.
        """
        if self.peak_without_scratch_bytes is None:
            return None
        return max(0, self.peak_without_scratch_bytes - self.start_bytes)

    @property
    def net_bytes(
        self,
    ) -> Annotated[
        int,
        Figure(
            "net change",
            "end_bytes minus start_bytes; negative if tensors from before were freed.",
            judged_as="retained_bytes",
        ),
    ]:
        """Level at exit minus level at entry; negative if tensors from before were freed."""
        return self.end_bytes - self.start_bytes

    def in_mb(self, figure: str) -> float | None:
        """Return a figure in MB: ``in_mb("peak_bytes")``.

        Args:
            figure: the name of one in bytes.

        Returns:
            MB (2**20 bytes); None if it was not measured.
        """
        size = getattr(self, figure)
        return None if size is None else size / MB

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, measured and derived.

        Returns:
            Builtin types in a fixed order; sizes in bytes.
        """
        # asdict() of the whole record would take a second for 100,000 samples.
        plain = dict(zip(_ORDER, _values_in_order(self), strict=True))
        for name in NESTED:
            plain[name] = _plain(name, plain[name])
        timeline = plain.pop("timeline")
        derived = {figure.name: getattr(self, figure.name) for figure in DERIVED}
        return {**plain, **derived, "timeline": timeline}

    def filled(self) -> dict[str, Any]:
        """Return what was measured, without the fields that have nothing, which is most of them.

        Each test report has this, and a session of 20,000 tests keeps all of them.

        Returns:
            Builtin types; :meth:`from_dict` returns an equal record.
        """
        fields = {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False and value is not _NOTHING
        }
        fields["completed"] = self.completed
        for name in NESTED.intersection(fields):
            fields[name] = _plain(name, fields[name])
        return fields

    @classmethod
    def of(cls, **figures: Any) -> "RegionRecord":
        """Return a record with these fields, in a tenth of the time of the constructor.

        The constructor of a frozen dataclass calls ``object.__setattr__`` for each of the 60
        fields, and each test that is measured has a record. Of fields that are not given, the class
        has the defaults.

        Args:
            **figures: all fields without a default, and any others.
        """
        record = object.__new__(cls)
        vars(record).update(figures)
        return record

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RegionRecord":
        """Rebuild a record; keys that it does not know are ignored.

        Args:
            data: what :meth:`to_dict` has returned, also after JSON.

        Returns:
            An equal record.

        Raises:
            ShapeError: if a value is missing or has the wrong type.
        """
        record: RegionRecord = decode(cls, dict(data), "")
        return record


def _plain(name: str, value: Any) -> Any:
    """Return the value of a field that has parts, in builtin types."""
    if name in HOLDINGS:
        return [_without_empty_paths(asdict(holding)) for holding in value]
    if name == "reserve_segments":
        return [asdict(segment) for segment in value]
    if name == "refusal":
        return None if value is None else dict(vars(value))
    return [dict(vars(part)) for part in value]


def _without_empty_paths(holding: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in holding.items() if value or key != "paths"}


_BASES = (ReserveFigures, AdditionalFigures, BatchFigures)
"""Their fields follow those of the record itself."""


_PLACES = {field.name: place for place, base in enumerate(_BASES, 1) for field in fields(base)}
_ORDER = sorted(
    (field.name for field in fields(RegionRecord)), key=lambda name: _PLACES.get(name, 0)
)
_values_in_order = attrgetter(*_ORDER)
HOLDINGS = tuple(field.name for field in fields(RegionRecord) if field.type == tuple[Holding, ...])
"""Fields of the record that list the storages whose bytes a figure counts."""
NESTED = {"refusal", *(field.name for field in fields(RegionRecord) if field.default == ())}
"""Fields that have parts: all that are tuples, and one."""
_NOTHING = ()


def _row(name: str, annotation: Any) -> Figure | None:
    """Return the figure that an annotation describes; None if it describes none."""
    rows = [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Figure)]
    if not rows:
        return None
    optional = type(None) in getattr(annotation.__origin__, "__args__", ())
    return replace(rows[0], name=name, optional=optional)


def _rows(annotations: Mapping[str, Any]) -> tuple[Figure, ...]:
    rows = (_row(name, annotation) for name, annotation in annotations.items())
    return tuple(row for row in rows if row is not None)


MEASURED = _rows(get_type_hints(RegionRecord, include_extras=True))
"""Figures that a meter measures: fields of the record."""
DERIVED = _rows(
    {
        name: get_type_hints(member.fget, include_extras=True).get("return")
        for base in (RegionRecord, *_BASES)
        for name, member in vars(base).items()
        if isinstance(member, property)
    }
)
"""Figures that follow from the measured ones: properties of the record."""
FIGURES: Mapping[str, Figure] = {figure.name: figure for figure in (*MEASURED, *DERIVED)}
"""The registry: name -> row."""
_BY_POSITION = sorted(FIGURES.values(), key=lambda figure: figure.position)
COLUMNS = tuple(figure for figure in _BY_POSITION if figure.column)
"""Figures that tables show, from left to right."""
COMPARED: Mapping[str, Figure] = {row.name: row for row in _BY_POSITION if row.in_baselines}
"""Figures that baselines keep and comparisons look at."""
EXPLAINED: Mapping[str, str] = {
    name: row.judged_as or name
    for name, row in FIGURES.items()
    if FIGURES[row.judged_as or name].explained_by
}
"""Figure -> the figure whose storages explain it, for those that storages explain."""
READABLE = tuple(dict.fromkeys((*(field.name for field in fields(RegionRecord)), *FIGURES)))
"""Everything that can be read from a record by name."""


def shown_columns(records: Iterable[RegionRecord]) -> tuple[Figure, ...]:
    """Return the columns of a table of `records`; some are left out if no region has a value."""
    known = list(records)
    return tuple(row for row in COLUMNS if _is_shown(row, known))


def _is_shown(row: Figure, records: Sequence[RegionRecord]) -> bool:
    values = [getattr(record, row.name) for record in records]
    if row.only_if_not_zero:
        return any(values)
    return not row.only_if_known or any(value is not None for value in values)


def rounded_figures(record: RegionRecord) -> dict[str, int | None]:
    """Return the compared figures in whole bytes; growth is rounded up and never negative.

    A figure that may replace another (``in_place_of``) is left out if the meter does not know it.
    """
    values = {name: getattr(record, name) for name in COMPARED}
    return {
        name: None if value is None else max(0, math.ceil(value))
        for name, value in values.items()
        if value is not None or not COMPARED[name].in_place_of
    }
