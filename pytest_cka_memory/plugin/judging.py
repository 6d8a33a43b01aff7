"""Judge the regions of one test."""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import pytest

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.markers import NO_ALLOCATIONS
from pytest_cka_memory.core.verdicts import Breach, Limit, Result, Unjudged
from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.plugin.plan import plan_of
from pytest_cka_memory.plugin.settings import settings_key


def is_untouched(record: RegionRecord, meter: Meter) -> bool:
    """Whether nothing was ever live on an accelerator between the start and end of `record`."""
    return meter.device != "cpu" and record.completed and record.peak_bytes == 0


def without_kept_limits(item: pytest.Item, results: Sequence[Result], meter: Meter) -> list[Result]:
    """Return the results of a test that allocated nothing on the device, with other verdicts.

    Its markers on memory of the device break their limits, because the test asks for them. The
    limits of options and of other plugins on it, which may be meant for other tests, are not
    judged.
    """
    allowed = item.config.stash[settings_key].allow_no_allocations
    if allowed or item.get_closest_marker(NO_ALLOCATIONS) is not None:
        return list(results)
    nothing = f"nothing was allocated on {meter.torch_device}"
    plan = plan_of(item)
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
