"""Judge a relation between two tests when both have run, in whichever processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_cka_memory.core.relations import ComparedRegion, limit_from_dict
from pytest_cka_memory.core.verdicts import Breach, Result, Unjudged

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
    limit = limit_from_dict(relation, facts[worker])
    other = _other_region(regions.get(limit.reference, ()), worker, relation["label"], facts)
    for number, region in enumerate(regions.get(nodeid, ())):
        if (region["worker"], region["label"]) != (worker, relation["label"]):
            continue
        result = Result.from_dict(region)
        if not result.record.completed:
            continue
        verdicts = [limit.missing()] if other is None else limit.compared(result.record, other)
        breaches = [it for it in verdicts if isinstance(it, Breach)]
        waited = (it for it in result.unjudged if it.limit != limit.text)
        judged = replace(
            result,
            breaches=(*result.breaches, *breaches),
            unjudged=(*waited, *(it for it in verdicts if isinstance(it, Unjudged))),
        )
        regions[nodeid][number] = judged.to_dict()
        yield from ((judged, breach) for breach in breaches)


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
