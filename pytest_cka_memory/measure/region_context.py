"""What ``measure()`` returns: a context manager that reports if it is used without ``with``.

And the labels of the regions that it opens.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.evidence import Explainer
from pytest_cka_memory.measure.region import Region, public_names
from pytest_cka_memory.measure.region_stack import (
    ClosedRegion,
    RegionStack,
    record_of,
    region_stack_for,
)
from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.meters.blocks.python_objects import CompiledCensus
from pytest_cka_memory.meters.collector import not_counted

Opening = Callable[[], AbstractContextManager[Region]]

_OF_REGIONS = public_names()


class Labels:
    """The labels of a probe's regions, each used once.

    Args:
        are_numbered: whether a label that is used again gets a number: ``region #2``.
    """

    def __init__(self, are_numbered: bool) -> None:
        self._are_numbered = are_numbered
        self._counts: dict[str, int] = {}

    def unique(self, label: object) -> str:
        """Return a user's label as a region gets it: ``region`` for None or an empty one."""
        # Without line breaks, because reports and xdist take only that.
        return self._numbered(("" if label is None else " ".join(str(label).split())) or "region")

    def _numbered(self, label: str) -> str:
        count = self._counts[label] = self._counts.get(label, 0) + 1
        if count == 1 or not self._are_numbered:
            return label
        # Recursive, because the user may have used the numbered label too.
        return self._numbered(f"{label} #{count}")

    def forget(self, labels: Iterable[str]) -> None:
        """Take back labels of regions that are not reported."""
        for label in labels:
            self._counts[label] -= 1


def function_name(func: Callable[..., Any]) -> str:
    """Return the label of a region that measures a call of `func`."""
    return getattr(func, "__name__", type(func).__name__)


class RegionContext(ContextDecorator, AbstractContextManager[Region]):
    """Opens a region when its ``with`` block begins, and closes it when the block ends.

    Args:
        opening: opens the region; called when the block begins.
        label: as the user gave it, for messages.
        unused: the contexts of this probe that were never used; this one is added.
    """

    def __init__(
        self, opening: Opening, label: str | None, unused: "list[RegionContext] | None" = None
    ) -> None:
        self._opening, self._label = opening, label
        self._unused = [] if unused is None else unused
        self._unused.append(self)
        self._region: AbstractContextManager[Region] | None = None

    def __enter__(self) -> Region:
        if self._region is not None:
            raise RegionError(
                f"cka_memory.{self._call} was already used in a 'with' block; call "
                "cka_memory.measure() again for each block"
            )
        self._note_use()
        self._region = self._opening()
        return self._region.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._region is not None, "a block that ends has begun"
        return self._region.__exit__(kind, error, trace)

    def __call__(self, func: Any) -> Any:
        """Return `func`, measured at every call."""
        self._note_use()
        return super().__call__(func)

    def _recreate_cm(self) -> "RegionContext":
        """Return the context for one call of a decorated function."""
        return RegionContext(self._opening, self._label)

    def _note_use(self) -> None:
        if self in self._unused:
            self._unused.remove(self)

    @property
    def _call(self) -> str:
        """How the user called :meth:`MemoryProbe.measure`: ``measure('train')``."""
        return f"measure({'' if self._label is None else repr(self._label)})"

    @property
    def mistake(self) -> str:
        """What is wrong with a call whose region was never opened, and what to write instead."""
        return (
            f"cka_memory.{self._call} was called without 'with', so nothing was measured; write "
            f"'with cka_memory.{self._call} as region:'"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _OF_REGIONS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._region is None:
            raise RegionError(
                f"cannot read {name}: {self.mistake}, and read region.{name} after the block"
            )
        raise RegionError(
            f"cannot read {name}: cka_memory.{self._call} is not the region, only a context "
            f"manager that returns it; write 'with cka_memory.{self._call} as region:', and read "
            f"region.{name} after the block"
        )


class ReportedRegion:
    """The region around a test that is only reported: it has no boundaries and no explanation.

    Most tests of a session that reports all of them have such a region, so it does only what that
    needs. Only for a device that never refuses memory and whose blocks are known.

    Args:
        stack: that of the meter.
        is_thorough: see :class:`.MemoryProbe`.
        before_reading: see there.
    """

    def __init__(
        self,
        stack: RegionStack,
        is_thorough: Callable[[], bool],
        before_reading: Callable[[], None],
    ) -> None:
        self._stack, self._is_thorough, self._before_reading = stack, is_thorough, before_reading
        before_reading()
        self._opened = stack.open(thorough=is_thorough())

    def end(self, completed: bool) -> RegionRecord:
        """End it; return its record."""
        try:
            record = record_of("", self._opened, self._read_end(), timeline=())
            return record if completed else replace(record, completed=False)
        finally:
            self._stack.close(self._opened)

    @not_counted
    def _read_end(self) -> ClosedRegion:
        CompiledCensus.remember_now()  # first, as in other regions: cleaning makes objects
        self._before_reading()
        thorough = self._is_thorough()
        return self._stack.figures_at_end(self._opened, thorough, lists_survivors=False)


def begin_region(
    meter: Meter,
    explainer: Callable[[], Explainer],
    is_thorough: Callable[[], bool],
    also: Collection[str],
    before_reading: Callable[[], None],
    *,
    needs_evidence: bool,
) -> Region | ReportedRegion:
    """Begin a region without a probe, a label and a context; :func:`end_region` must follow.

    Each test of a session has one around all of it, which must take little time.

    Args:
        meter: see :class:`.MemoryProbe`, as for the others.
        explainer: returns the one described there.
        is_thorough: see there.
        also: see there.
        before_reading: see there.
        needs_evidence: whether a figure may be explained, or batch boundaries are marked.
    """
    stack = region_stack_for(meter)
    never_refuses = meter.device == "cpu" and type(meter).refused is Meter.refused
    if never_refuses and meter.knows_blocks and not (needs_evidence or also):
        return ReportedRegion(stack, is_thorough, before_reading)
    return Region("", stack, explainer(), is_thorough, also, before_reading)


def end_region(
    region: Region | ReportedRegion, completed: bool, error: BaseException | None
) -> RegionRecord:
    """End a region of :func:`begin_region`; return its record.

    Args:
        region: the region.
        completed: whether its code has ended without an exception.
        error: the exception otherwise.
    """
    if isinstance(region, ReportedRegion):
        return region.end(completed)
    region._close(completed, error=error)
    return region.record


def never_closed(labels: Iterable[str]) -> str:
    """Return a message about regions that were open at the end."""
    names = [repr(label) for label in labels]
    if len(names) == 1:
        return (
            f"region {names[0]} was never closed, so it was not judged; open it in a 'with' block"
        )
    return (
        f"regions {', '.join(names)} were never closed, so they were not judged; open each of them "
        "in a 'with' block"
    )
