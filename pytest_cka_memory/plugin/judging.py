"""Judge the regions of one test: which figures to explain, the verdicts, what reports get."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.markers import NO_ALLOCATIONS
from pytest_cka_memory.core.report import Payload
from pytest_cka_memory.core.verdicts import Breach, Limit, Result, Unjudged, judge
from pytest_cka_memory.errors import LimitWarning
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import ReportedRegion, begin_region, never_closed
from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.plugin import is_narrowed, kept_tracebacks
from pytest_cka_memory.plugin.device import meter_of
from pytest_cka_memory.plugin.item_probes import (
    ItemExplainer,
    WholeTest,
    additions_of,
    files_of,
    probe_for,
    runs_of,
)
from pytest_cka_memory.plugin.plan import ItemPlan, compared_key, plan_of
from pytest_cka_memory.plugin.pytest_private import fail, terminal_width
from pytest_cka_memory.plugin.settings import Settings, settings_key
from pytest_cka_memory.reports import tables

if TYPE_CHECKING:
    from pytest_cka_memory.limits import FlatPerBatch


class CallOutcome(NamedTuple):
    """What is known of the call of a test."""

    has_begun: bool = False
    """Whether the test's own code has been seen running."""
    returned: bool = False
    """Whether it has ended without an exception."""
    is_untouched: bool = False
    """Whether it has allocated nothing on the measured accelerator."""
    compared: Sequence[tuple[str, RegionRecord]] = ()
    """The figures that the failed test has compared itself, each with its region."""


class Judgement(NamedTuple):
    """The verdicts on some regions of a test."""

    results: Sequence[Result]
    relations: Sequence[dict[str, Any]]
    """The relations to tests that have not run yet, in builtin types."""
    mistakes: Sequence[str]
    """What other plugins returned that cannot be reported."""
    is_broken: bool
    """Whether a limit is broken, also if it only warns."""


_BREACHES = attrgetter("breaches")
_NOT_SEEN, _BEGUN = CallOutcome(), CallOutcome(has_begun=True)
_OVER_RUNS = "repeated runs"
"""The label of the region over all runs."""
properties_key = pytest.StashKey[list[tables.Property]]()
"""What the last run of a test has added to its properties, for JUnit XML and the like."""


class ItemJudge:
    """Judges the regions of one test as they end, and keeps what its reports get."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._settings = settings = item.config.stash[settings_key]
        self.runs = 1 if settings.repeat == 1 else runs_of(item, settings)
        """How often the code of the test runs."""
        self.meter = meter_of(item.config)
        self._records: list[RegionRecord] = []
        self._limits: Sequence[Limit] = ()
        """As of the start of the call."""
        self._explainer: ItemExplainer | None = None
        self._probe: MemoryProbe | None = None
        self.files = files_of(item, self.meter, settings)
        self._call = _NOT_SEEN
        self._judged = 0
        """How many of the probe's regions were judged."""
        self._unreported: list[Judgement] = []
        """Those that no report has taken along yet."""
        self._facts: dict[str, Any] = {}
        """Of the meter when regions were last judged: what a test does may add to them."""

    @property
    def probe(self) -> MemoryProbe:
        """What measures the regions of the test and of its fixtures; most tests open none."""
        if self._probe is None:
            self._explainer = ItemExplainer(self._item, self._settings, self._limits)
            probe = probe_for(self._item, self._explainer, self._settings)
            probe.records = self._records
            self._probe = probe
        return self._probe

    @property
    def records(self) -> list[RegionRecord]:
        """The figures of the regions that have ended: of the test and of its fixtures, or of the
        whole test.
        """
        return self._records if self._probe is None else self._probe.records

    def forget_from(self, number: int) -> None:
        """Forget the regions that have ended after the first `number` ones."""
        if self._probe is not None:
            self._probe.forget_from(number)

    def begin_call(self) -> None:
        """Take note that the call of the test begins."""
        self._call = _BEGUN
        self._limits = plan_of(self._item).usable_limits()
        if self._explainer is not None:
            self._explainer.limits = self._limits

    def begin_region(self) -> Region | ReportedRegion:
        """Begin a region around the whole test, in case it opens none."""
        item, settings, limits = self._item, self._settings, self._limits
        over_runs = _limits_over_runs(settings) if self.runs > 1 else ()
        return begin_region(
            self.meter,
            partial(WholeTest, item, settings, limits, over_runs, self.records),
            self._is_thorough,
            additions_of(item, settings, limits),
            partial(kept_tracebacks.release_in_call, item),
            needs_evidence=bool(limits or over_runs or settings.explain),
        )

    def _is_thorough(self) -> bool:
        """Whether the figures of the whole test are more than a row in the report."""
        settings = self._settings
        is_exact = settings.explain or settings.baseline.updating or settings.also
        # As of now: a test may get a marker while it runs.
        return bool(is_exact or self.runs > 1 or self._limits or plan_of(self._item).limits)

    def explain_compared(self, error: BaseException) -> Sequence[tuple[str, RegionRecord]]:
        """Explain the figures that a test has read before it has raised an error."""
        return () if self._probe is None else self._probe.explain_compared(error)

    def end_call(self, outcome: CallOutcome, whole: Sequence[RegionRecord]) -> Judgement:
        """Judge the regions of the call, and over all runs the figures of the whole test."""
        self._call = outcome
        if self.runs == 1:
            return self._judge()
        return self._judge([replace(record, label=_OVER_RUNS) for record in whole])

    def complete_none(self, first: int) -> None:
        """Mark the regions from the number `first` on as not completed, so that none is judged."""
        ended = self.records[first:]
        self.records[first:] = [replace(record, completed=False) for record in ended]

    def judge_late_regions(self) -> None:
        """Judge regions that ended after the call, in the teardown of a fixture."""
        if not self._call.returned:  # the traceback references what was allocated in them
            self.complete_none(self._judged)
        left_open = self.probe.end_open()
        self.fail_on_breach(self._judge())
        if left_open and self._call.returned:
            fail(never_closed(left_open))

    def judge_without_limits(self) -> None:
        """Report a test that requested the fixture only while it ran, when it had no limits."""
        self._call = CallOutcome(has_begun=True, returned=True)
        self.fail_on_breach(self._judge())

    def fail_on_breach(self, judgement: Judgement) -> None:
        """Fail the test if a limit is broken, or with mistakes; warn of limits that only warn."""
        unused: list[str] = []
        if self._probe is not None:
            if self._call.returned:
                unused = [context.mistake for context in self._probe.unused]
            self._probe.unused.clear()
        if judgement.is_broken or judgement.mistakes or unused:
            _fail(self._item, judgement, self.meter, unused)

    def refuse_unseen(self) -> None:
        """Fail a test whose own limits were never checked, because silence would look like a pass.

        The limits of the session's options do not fail it: the report counts it as not measured.
        """
        if self._call.has_begun:  # then it was judged
            return
        plan = plan_of(self._item)
        plan.usable_limits()
        if plan.own_limits:
            reason = _unseen_reason(self._item)
            fail(
                f"{', '.join(limit.text for limit in plan.own_limits)}: not checked. "
                f"{reason[0].upper()}{reason[1:]}; write the test as a plain or async "
                "function, or remove the marker",
            )

    def take_payload(self, report: pytest.TestReport) -> Payload | None:
        """Return what travels on the report of a phase; None if there is nothing new."""
        if not self._unreported and self._call.has_begun:  # in the report of the teardown
            return None
        judgements, self._unreported = self._unreported, []
        results = [result for judgement in judgements for result in judgement.results]
        relations = [it for judgement in judgements for it in judgement.relations]
        unseen = report.when == "call" and report.passed and not self._call.has_begun
        unmeasured = [_unseen_reason(self._item)] if unseen else []
        if not results and not unmeasured:
            return None
        payload: Payload = {
            "facts": self._facts or self.meter.facts(),
            "regions": [result.filled() for result in results],
            "unmeasured": unmeasured,
            "narrowed": is_narrowed(self._item.config),
        }
        if relations:
            payload["relations"] = relations
        return payload

    def add_explanations(self, report: pytest.TestReport) -> None:
        """Add to the text of a failed test what explains the figures that it has compared, or what
        the device had in use when it ran out of memory.
        """
        compared = self._call.compared
        refused = [record for record in self.records if record.refusal is not None]
        add_section = getattr(report.longrepr, "addsection", None)
        if not (compared or refused) or add_section is None:
            return
        self._call = self._call._replace(compared=())
        from pytest_cka_memory.reports import failure

        facts, width = self.meter.facts(), _failure_width(self._item.config)
        lines = [*failure.compared(compared, facts, width)]
        if refused and report.when == "call":  # the innermost region ends first
            lines += failure.out_of_memory(refused[0], facts, width)
        if lines:
            add_section("cka-memory", "\n".join(lines))

    def _judge(self, over_runs: Sequence[RegionRecord] = ()) -> Judgement:
        """Judge the regions that have ended since the last time, and note what reports get.

        Args:
            over_runs: the figures over all runs of a test that was repeated.
        """
        item, probe, records = self._item, self._probe, self.records
        records, self._judged = records[self._judged :], len(records)
        plan = plan_of(item)  # as of now, because a test may get a marker while it runs
        judgement = _judge_regions(item, plan, records, over_runs, self._call, self.meter)
        self._unreported.append(judgement)
        self._facts = self.meter.facts()
        figures = tables.properties_of(judgement.results, self._facts, item.config.rootpath)
        if probe is not None and probe.largest_sizes:
            figures += [(tables.LARGEST_PROPERTY, size) for size in probe.largest_sizes]
            probe.largest_sizes.clear()
        if figures:
            item.stash.setdefault(properties_key, []).extend(figures)
            item.user_properties += figures
        return judgement


judge_key = pytest.StashKey[ItemJudge]()
"""What has the measurement of a test; it is dropped after the test's last report."""


def judge_of(item: pytest.Item) -> ItemJudge | None:
    """Return what judges `item`, made on first use; None for a test that is not measured."""
    if judge_key in item.stash:
        return item.stash[judge_key]
    return _begin_measuring(item) if plan_of(item).is_measured else None


def judge_for_fixture(item: pytest.Item) -> ItemJudge:
    """Return what judges `item`, also if it requests the fixture only while it runs."""
    return judge_of(item) or _begin_measuring(item)


def _begin_measuring(item: pytest.Item) -> ItemJudge:
    judge = item.stash[judge_key] = ItemJudge(item)
    return judge


def _judge_regions(
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
    limits, nodeid = plan.usable_limits(), item.nodeid
    has_compared = compared_key in item.config.stash
    compared = item.config.stash[compared_key].get(nodeid) if has_compared else None
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
    results = [judge(nodeid, record, limits) for record in records]
    if over_runs:
        of_runs = _limits_over_runs(item.config.stash[settings_key])
        results += [judge(nodeid, record, of_runs) for record in over_runs]
    if call.is_untouched and are_untouched(records, meter):
        results = _without_kept_limits(item, plan, results, meter)
    mistakes: list[str] = []
    # item.ihook takes a while: it looks for the conftest files that belong to the test.
    hook = item.config.hook.pytest_cka_memory_region
    if hook.get_hookimpls() and item.ihook.pytest_cka_memory_region.get_hookimpls():
        from pytest_cka_memory.plugin.other_plugins import with_fields

        results = [with_fields(item, result, mistakes) for result in results]
    # A test that has failed for a reason of its own is not failed for a plugin's mistake.
    is_broken = any(map(_BREACHES, results))
    return Judgement(results, relations, mistakes if call.returned else (), is_broken)


def _limits_over_runs(settings: Settings) -> "Sequence[FlatPerBatch]":
    """Return the limit on growth over the runs: each is a batch, the first is the warm-up."""
    from pytest_cka_memory.limits import FlatPerBatch

    text = f"--cka-memory-repeat={settings.repeat}"
    return [FlatPerBatch(text, 0, 1, unit="run", warns=settings.only_warns)]


def _fail(item: pytest.Item, judgement: Judgement, meter: Meter, mistakes: Sequence[str]) -> None:
    """Fail the test for broken limits and for mistakes; warn of limits that only warn."""
    texts: list[str] = []
    headline = ""
    if judgement.is_broken:
        from pytest_cka_memory.reports import failure

        texts += filter(None, [_failure_text(item.config, judgement.results, meter)])
        headline = failure.headline(judgement.results)
        warning = _failure_text(item.config, judgement.results, meter, warns=True)
        if warning:
            item.warn(LimitWarning(warning))
    texts += [*judgement.mistakes, *mistakes]
    if texts:
        fail("\n".join(texts), headline)


def _failure_text(
    config: pytest.Config, results: Sequence[Result], meter: Meter, *, warns: bool = False
) -> str:
    """Return the text about the limits that are broken and fail, or that only warn."""
    from pytest_cka_memory.reports import failure

    return failure.render(results, meter.facts(), _failure_width(config), warns=warns)


def _failure_width(config: pytest.Config) -> int:
    """Return the characters of a line in the text of a failure."""
    from pytest_cka_memory.reports import failure

    return min(failure.WIDTH, terminal_width(config))


# A test with a forgotten ``.to(device)`` would keep every limit, because it allocates nothing on
# the measured accelerator. On the CPU nothing can be forgotten, and many tests with
# ``zero_retention`` allocate nothing there. Limits on something else than memory of the device,
# such as that of the process, are judged as in every test.


def are_untouched(records: Iterable[RegionRecord], meter: Meter) -> bool:
    """Whether nothing was ever live on an accelerator between the start and end of any of these."""
    if meter.device == "cpu":
        return False
    return all(record.completed and record.peak_bytes == 0 for record in records)


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
        f"cannot be judged because {nothing} during the test (a forgotten .to(device)?): "
        "create models and data on cka_memory.device, or, if the test is not meant to use "
        f"this device, add @pytest.mark.{NO_ALLOCATIONS}"
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


_KINDS = {
    "DoctestItem": "doctests",
    "TestCaseFunction": "async methods of a unittest.TestCase (not of an IsolatedAsyncioTestCase)",
}
"""Name of a class of pytest's -> what users call its items."""


def _unseen_reason(item: pytest.Item) -> str:
    """Return why the code of an item of this kind cannot be measured."""
    name = type(item).__name__
    return f"{_KINDS.get(name, f'{name} items')} run their code in a way that cannot be measured"
