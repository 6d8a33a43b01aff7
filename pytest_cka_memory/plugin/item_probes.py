"""What the regions of one test measure and explain."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from pytest_cka_memory.core.figure_rows import TIMELINE
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.growth import GROWTH_ON_HOST
from pytest_cka_memory.core.verdicts import Limit, judge
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.plugin import kept_tracebacks
from pytest_cka_memory.plugin.device import meter_of
from pytest_cka_memory.plugin.plan import compared_key, plan_of
from pytest_cka_memory.plugin.pytest_private import without_capture
from pytest_cka_memory.plugin.settings import settings_key


class ItemExplainer:
    """Decides which figures of a test's regions are explained, before their tensors are freed."""

    def __init__(self, item: pytest.Item) -> None:
        self.limits: Sequence[Limit] = ()
        """As of the start of the call; batch boundaries use these."""
        self._item = item
        self._settings = item.config.stash[settings_key]

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        """Return the figures to explain: those too high and, on request, what is retained."""
        return self._figures(record, self.limits, explains_all=self._settings.explain)

    def _figures(
        self, record: RegionRecord, judged_by: Sequence[Limit], *, explains_all: bool
    ) -> Collection[str]:
        figures = {"retained_bytes", "peak_bytes"} if explains_all else set()
        if judged_by:
            figures |= _figures_too_high(self._item.nodeid, record, judged_by)
        if any(limit.reports_host for limit in self.limits):
            figures.add(GROWTH_ON_HOST)
        return figures

    def named_values(self) -> Mapping[str, Any]:
        """Return the test's fixtures by name, and ``self`` if it is a method."""
        instance = getattr(self._item, "instance", None)
        own = {} if instance is None else {"self": instance}
        return {**own, **getattr(self._item, "funcargs", {})}

    def notify(self, line: str) -> None:
        """Write a line to standard error, which pytest captures otherwise."""
        from pytest_cka_memory.holders.survivors import to_stderr

        with without_capture(self._item.config):
            to_stderr(line)

    @property
    def draws_paths(self) -> bool:
        """Whether the session asks for a picture of the references to what is retained."""
        return self._settings.draws_paths


class WholeTestExplainer(ItemExplainer):
    """Explains figures of the region around the whole test."""

    def __init__(
        self,
        item: pytest.Item,
        limits: Sequence[Limit],
        over_runs: Sequence[Limit],
        has_regions: Callable[[], bool],
    ) -> None:
        super().__init__(item)
        self.limits = limits
        self._over_runs = over_runs
        self._has_regions = has_regions
        """Whether the test has regions of its own, so that only growth over its runs is judged."""

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        """Return the figures to explain; none of a region that is not reported."""
        if self._has_regions():
            return self._figures(record, self._over_runs, explains_all=False)
        judged_by = [*self.limits, *self._over_runs]
        return self._figures(record, judged_by, explains_all=self._settings.explain)


def _figures_too_high(nodeid: str, record: RegionRecord, limits: Sequence[Limit]) -> set[str]:
    """Return the figures of a region that break one of the limits."""
    breaches = judge(nodeid, record, limits).breaches
    return {breach.figure for breach in breaches if breach.measured_bytes is not None}


def probe_for(
    item: pytest.Item, explainer: ItemExplainer, is_thorough: Callable[[], bool] = lambda: True
) -> MemoryProbe:
    """Return a probe for regions of a test.

    Args:
        item: the test.
        explainer: decides which figures are explained.
        is_thorough: whether garbage in reference cycles must be freed first.
    """
    meter = meter_of(item.config)
    return MemoryProbe(
        meter=meter,
        explainer=explainer,
        is_thorough=is_thorough,
        also=partial(_additions_of, item),
        before_reading=partial(kept_tracebacks.release_in_call, item),
    )


def _additions_of(item: pytest.Item) -> Collection[str]:
    """Return what the regions of a test measure in addition."""
    of_limits = {limit.addition for limit in plan_of(item).limits} - {""}
    settings = item.config.stash[settings_key]
    drawn = [TIMELINE] if settings.draws(item.nodeid) else []
    compared = item.config.stash.get(compared_key, {}).get(item.nodeid)
    for_others = compared.additions if compared is not None else ()
    return of_limits.union(settings.also, drawn, for_others)


def is_judged_as_a_whole(item: pytest.Item, runs: int) -> bool:
    """Whether the figures of the whole test are more than a row in the report."""
    settings = item.config.stash[settings_key]
    is_exact = settings.explain or settings.baseline.updating or settings.also
    return bool(is_exact or runs > 1 or plan_of(item).limits)
