"""Judge the regions of one test: which figures to explain, the verdicts, and the failure's text."""

import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.growth import GROWTH_ON_HOST
from pytest_cka_memory.core.markers import NO_ALLOCATIONS
from pytest_cka_memory.core.verdicts import Breach, Limit, Result, Unjudged, judge
from pytest_cka_memory.errors import LimitWarning
from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.plugin.plan import ItemPlan, compared_key
from pytest_cka_memory.plugin.pytest_private import fail, terminal_width, without_capture
from pytest_cka_memory.plugin.settings import Settings, settings_key
from pytest_cka_memory.units import is_plain_number

if TYPE_CHECKING:
    from pytest_cka_memory.limits import FlatPerBatch


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
            figures |= figures_too_high(self._item.nodeid, record, judged_by)
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


def figures_too_high(nodeid: str, record: RegionRecord, limits: Sequence[Limit]) -> set[str]:
    """Return the figures of a region that break one of the limits."""
    breaches = judge(nodeid, record, limits).breaches
    return {breach.figure for breach in breaches if breach.measured_bytes is not None}


@dataclass(frozen=True)
class CallOutcome:
    """What is known of the call of a test."""

    has_begun: bool = False
    """Whether the test's own code has been seen running."""
    returned: bool = False
    """Whether it has ended without an exception."""
    is_untouched: bool = False
    """Whether it has allocated nothing on the measured accelerator."""
    compared: Sequence[tuple[str, RegionRecord]] = ()
    """The figures that the failed test has compared itself, each with its region."""


@dataclass(frozen=True)
class Judgement:
    """The verdicts on some regions of a test."""

    results: Sequence[Result]
    relations: Sequence[dict[str, Any]]
    """The relations to tests that have not run yet, in builtin types."""
    mistakes: Sequence[str]
    """What other plugins returned that cannot be reported."""

    @property
    def is_broken(self) -> bool:
        """Whether a limit is broken, also if it only warns."""
        return any(result.breaches for result in self.results)


def judge_regions(
    item: pytest.Item,
    plan: ItemPlan,
    records: Sequence[RegionRecord],
    over_runs: Sequence[RegionRecord],
    call: CallOutcome,
    meter: Meter,
) -> Judgement:
    """Judge regions of a test by the limits of its plan.

    Args:
        item: the test.
        plan: as of now, because a test may get a marker while it runs.
        records: the figures of the regions.
        over_runs: the figures over all runs of a test that was repeated.
        call: what is known of the call.
        meter: what has measured the regions.
    """
    limits = plan.usable_limits()
    compared = item.config.stash.get(compared_key, {}).get(item.nodeid)
    if compared is not None:
        from pytest_cka_memory.core.relations import ComparedRegion

        facts = meter.facts()
        ended = {
            record.label: ComparedRegion(record, facts) for record in records if record.completed
        }
        compared.regions.update(ended)
    relations = [
        relation
        for limit in limits
        if hasattr(limit, "pending")
        for record in records
        if (relation := limit.pending(record)) is not None
    ]
    results = [judge(item.nodeid, record, limits) for record in records]
    settings = item.config.stash[settings_key]
    results += [judge(item.nodeid, it, limits_over_runs(settings)) for it in over_runs]
    if call.is_untouched and all(is_untouched(record, meter) for record in records):
        results = _without_kept_limits(item, plan, results, meter)
    mistakes: list[str] = []
    if item.ihook.pytest_cka_memory_region.get_hookimpls():
        results = [_with_fields(item, result, mistakes) for result in results]
    # A test that has failed for a reason of its own is not failed for a plugin's mistake.
    return Judgement(results, relations, mistakes if call.returned else ())


def limits_over_runs(settings: Settings) -> "Sequence[FlatPerBatch]":
    """Return the limit on growth over the runs: each is a batch, the first is the warm-up."""
    from pytest_cka_memory.limits import FlatPerBatch

    text = f"--cka-memory-repeat={settings.repeat}"
    return [FlatPerBatch(text, 0, 1, unit="run", warns=settings.only_warns)]


def fail_on_breach(
    item: pytest.Item, judgement: Judgement, meter: Meter, mistakes: Sequence[str] = ()
) -> None:
    """Fail the test if a limit is broken, or with mistakes; warn of limits that only warn."""
    texts: list[str] = []
    headline = ""
    if judgement.is_broken:
        from pytest_cka_memory.reports import failure

        texts += filter(None, [failure_text(item.config, judgement.results, meter)])
        headline = failure.headline(judgement.results)
        warning = failure_text(item.config, judgement.results, meter, warns=True)
        if warning:
            item.warn(LimitWarning(warning))
    texts += [*judgement.mistakes, *mistakes]
    if texts:
        fail("\n".join(texts), headline)


def failure_text(
    config: pytest.Config, results: Sequence[Result], meter: Meter, *, warns: bool = False
) -> str:
    """Return the text about the limits that are broken and fail, or that only warn."""
    from pytest_cka_memory.reports import failure

    return failure.render(results, meter.facts(), failure_width(config), warns=warns)


def failure_width(config: pytest.Config) -> int:
    """Return the characters of a line in the text of a failure."""
    from pytest_cka_memory.reports import failure

    return min(failure.WIDTH, terminal_width(config))


# A test with a forgotten ``.to(device)`` would keep every limit, because it allocates nothing on
# the measured accelerator. On the CPU nothing can be forgotten, and many tests with
# ``zero_retention`` allocate nothing there. Limits on something else than memory of the device,
# such as that of the process, are judged as in every test.


def is_untouched(record: RegionRecord, meter: Meter) -> bool:
    """Whether nothing was ever live on an accelerator between the start and end of `record`."""
    return meter.device != "cpu" and record.completed and record.peak_bytes == 0


def _without_kept_limits(
    item: pytest.Item, plan: ItemPlan, results: Sequence[Result], meter: Meter
) -> list[Result]:
    """Return the results of a test that allocated nothing on the device, with other verdicts.

    Its markers on memory of the device break their limits, because the test asks for them. The
    limits of options and of other plugins on it, which may be meant for other tests, are not
    judged.
    """
    allowed = item.config.stash[settings_key].allow_no_allocations
    if allowed or item.get_closest_marker(NO_ALLOCATIONS) is not None:
        return list(results)
    nothing = f"nothing was allocated on {meter.torch_device}"
    others = [limit.text for limit in plan.limits if not limit.judges_device]
    return [
        _rejudged(result, plan.marker_limits if number == 0 else (), others, nothing)
        for number, result in enumerate(results)
    ]


def _rejudged(
    result: Result, broken: Sequence[Limit], others: Sequence[str], nothing: str
) -> Result:
    """Return `result` without the limits that it has kept, except for `others`."""
    known = {breach.limit for breach in result.breaches}.union(others)
    known.update(unjudged.limit for unjudged in result.unjudged)
    kept = [limit for limit in result.limits if limit not in known]
    new = [limit for limit in broken if limit.text in kept]
    message = (
        f"cannot be judged because {nothing} during the test (a forgotten .to(device)?): create "
        "models and data on cka_memory.device, or, if the test is not meant to use it, add "
        f"@pytest.mark.{NO_ALLOCATIONS}"
    )
    breaches = [
        Breach(", ".join(texts), 0, None, message, "peak_increase_bytes", warns)
        for warns in (False, True)
        if (texts := [limit.text for limit in new if limit.warns == warns])
    ]
    unjudged = [Unjudged(text, nothing) for text in kept if text not in {each.text for each in new}]
    return replace(
        result,
        breaches=(*result.breaches, *breaches),
        unjudged=(*result.unjudged, *unjudged),
    )


REGION = "pytest_cka_memory_region"
_DEEPEST = 20
"""Levels of lists and dicts in a field that another plugin adds."""


def _with_fields(item: pytest.Item, result: Result, mistakes: list[str]) -> Result:
    """Return `result` with the fields that other plugins add; add theirs to `mistakes`."""
    try:
        fields = _fields_of(item, result)
        return replace(result, extra=fields) if fields else result
    except FieldError as error:
        mistakes.append(str(error))
        return result


class FieldError(Exception):
    """A field that cannot be reported; the message names its plugin and what to return instead."""


def _fields_of(item: pytest.Item, result: Result) -> dict[str, Any]:
    """Return the fields that other plugins add to a region.

    Raises:
        FieldError: if a field cannot be written as JSON; it names the plugin and the hook.
    """
    from pytest_cka_memory.plugin.item_limits import call_each_plugin

    fields: dict[str, Any] = {}
    arguments = {"item": item, "result": result}
    for plugin_name, returned in call_each_plugin(REGION, FieldError, arguments):
        problem = _problem_of_fields(returned, fields)
        if problem:
            raise FieldError(f"{plugin_name}: {REGION} returned {problem}")
        fields.update(returned)
    return fields


def _problem_of_fields(returned: object, others: Mapping[str, Any]) -> str:
    """Return what is wrong with the fields that a plugin returned; empty if nothing is."""
    if type(returned) is not dict:
        return f"{returned!r}; return a dict of fields, or None"
    twice = sorted(key for key in returned if key in others)
    if twice:
        return f"{twice[0]!r}, which another plugin has returned too; use another name"
    bad = next((key for key, value in returned.items() if not _is_plain({key: value})), None)
    if bad is None:
        return ""
    return (
        f"{bad!r}: {returned[bad]!r}; fields are texts, finite numbers, bools, None, or lists and "
        "dicts of these"
    )


def _is_plain(value: object, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    if type(value) is dict:
        return all(type(k) is str and _is_plain(v, depth + 1) for k, v in value.items())
    if type(value) is list:
        return all(_is_plain(v, depth + 1) for v in value)
    return value is None or type(value) in (str, bool) or is_plain_number(value)


def were_compared(error: AssertionError) -> bool:
    """Whether `error` comes from code that reads figures: ``assert region.retained_mb == 0``.

    The frame that raised it counts, or the one that called a method such as ``assertEqual``.
    """
    from pytest_cka_memory.measure.sweeps import Sweep

    names = {name for row in FIGURES.values() for name in (row.name, row.mb_name)}
    names.update(name for name in vars(Sweep) if "_mb" in name)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and _is_of_unittest(frames[-1]):
        frames.pop()
    return bool(frames) and not names.isdisjoint(frames[-1].f_code.co_names)


def _is_of_unittest(frame: FrameType) -> bool:
    unittest = sys.modules.get("unittest.case")  # not imported for a session that has no such test
    return unittest is not None and frame.f_globals is vars(unittest)
