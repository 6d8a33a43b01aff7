"""Judge a relation between two tests when both have run, in whichever processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.relations import ComparedRegion, limit_from_dict
from pytest_cka_memory.core.verdicts import Breach, Result, Unjudged, Verdict

Regions = dict[str, list[dict[str, Any]]]
"""Test -> its regions, as :meth:`Result.to_dict` returns them."""


def judged_late(
    regions: Regions,
    nodeid: str,
    worker: str,
    relation: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[Result, Breach]]:
    """Judge the regions of a test by one relation, change their verdicts, and yield its breaches.

    Args:
        regions: those of all tests; the verdicts are changed in place.
        nodeid: the test.
        worker: the process that has run it.
        relation: what it has reported, see ``RelationLimit.pending``.
        facts: process -> the facts of its meter.
    """
    verdicts_of = _verdicts_of(regions, worker, relation, facts)
    for number, region in enumerate(regions.get(nodeid, ())):
        if (region["worker"], region["label"]) != (worker, relation["label"]):
            continue
        result = Result.from_dict(region)
        if not result.record.completed:
            continue
        verdicts = verdicts_of(result.record)
        breaches = [it for it in verdicts if isinstance(it, Breach)]
        waited = (it for it in result.unjudged if it.limit != relation["text"])
        judged = replace(
            result,
            breaches=(*result.breaches, *breaches),
            unjudged=(*waited, *(it for it in verdicts if isinstance(it, Unjudged))),
        )
        regions[nodeid][number] = judged.to_dict()
        yield from ((judged, breach) for breach in breaches)


def _verdicts_of(
    regions: Regions,
    worker: str,
    relation: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
) -> Callable[[RegionRecord], Sequence[Verdict]]:
    """Return what judges a region by a relation."""
    if "later" in relation:
        module, _, function = relation["later"].partition(":")
        law = getattr(import_module(module), function)(relation)

        def find(nodeid: str, label: str) -> RegionRecord | None:
            found = _other_region(regions.get(nodeid, ()), worker, label, facts)
            return None if found is None else found.record

        law = replace(law, find=find)

        def by_law(record: RegionRecord) -> Sequence[Verdict]:
            is_missing = law.pending(record) is not None
            return [law.missing() if is_missing else law.judge(record)]

        return by_law
    limit = limit_from_dict(relation, facts[worker])
    other = _other_region(regions.get(limit.reference, ()), worker, relation["label"], facts)
    return lambda record: [limit.missing()] if other is None else limit.compared(record, other)


def _other_region(
    regions: Sequence[dict[str, Any]],
    worker: str,
    label: str,
    facts: Mapping[str, Mapping[str, Any]],
) -> ComparedRegion | None:
    """Return the completed region of a label; of several processes' that of the same one."""
    found = [it for it in regions if it["label"] == label and it["completed"]]
    found.sort(key=lambda region: region["worker"] != worker)
    if not found:
        return None
    return ComparedRegion(Result.from_dict(found[0]).record, facts[found[0]["worker"]])
