"""Limits that compare a region with the same region of another test, judged when both have run."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from typing import Any

from pytest_cka_memory.core.conditions import (
    Changed,
    changed,
    conditions_of,
    fingerprint_of,
    listed,
)
from pytest_cka_memory.core.figures import COMPARED, FIGURES, RegionRecord
from pytest_cka_memory.core.verdicts import (
    Breach,
    Limit,
    Result,
    Tolerance,
    Unjudged,
    Verdict,
    depending_on,
    differences,
    excess,
    not_comparable,
    parse_tolerance,
)
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import format_exact, parse_size

FIGURE_NAMES = {
    "peak": "peak_increase_bytes",
    "level": "peak_bytes",
    "retained": "retained_bytes",
    "growth": "growth_bytes_per_batch",
    "reserved": "reserved_increase_bytes",
    "cycles": "cycle_bytes",
    "process": "process_increase_bytes",
    "outside": "outside_increase_bytes",
}
"""What ``of`` can be -> the figure."""
_FACTOR = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*[x×*]\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Relation:
    """What one figure, or each compared figure, may be beside that of another test."""

    other: str
    """The id of the parameter that the other test has."""
    figure: str = ""
    """Empty: each figure that baselines keep."""
    factor: Fraction = Fraction(1)
    less_bytes: int = 0
    """How much less than the product it must be at least."""
    tolerance: Tolerance | None = None
    """How far each figure may rise above the other's, if no single one is compared."""
    strictly: bool = False
    """Whether it must be less, and not the same."""

    def allowed_bytes(self, other_bytes: float) -> float:
        """Return the most whole bytes that it may be; negative if nothing is little enough."""
        return int(Fraction(other_bytes) * self.factor) - self.less_bytes - int(self.strictly)


def relations_of(
    *,
    relative_to: object = None,
    less_than: object = None,
    at_most: object = None,
    saves: object = None,
    of: object = None,
    tolerance: Tolerance,
) -> list[Relation]:
    """Return the relations that the arguments of a marker ask for.

    Args:
        relative_to: id of a parameter: no figure may be more than `tolerance` above that of the
            test with it.
        less_than: id of a parameter: the figure `of` must be less.
        at_most: ``"0.5 x ID"``: the figure `of` may be at most so many times that of the other
            test.
        saves: a size, with `relative_to`: the figure `of` must be less by at least that.
        of: the figure, a key of ``FIGURE_NAMES``; the peak by default.
        tolerance: for `relative_to` alone.

    Raises:
        LimitError: if an argument cannot be read; it says what to write instead.
    """
    figure = FIGURE_NAMES.get(of) if isinstance(of, str) else None
    if figure is None and of is not None:
        raise LimitError(
            f"of={of!r} is not a figure for comparing two tests; write one of "
            f"{', '.join(map(repr, FIGURE_NAMES))}"
        )
    for name, value in (("relative_to", relative_to), ("less_than", less_than)):
        if value is not None and (not isinstance(value, str) or not value):
            raise LimitError(
                f"{name}={value!r} is not the id of a pytest parameter; write an id from "
                f"@pytest.mark.parametrize, e.g. {name}='eager'"
            )
    if of is not None and less_than is None and at_most is None and saves is None:
        raise LimitError(f"of={of!r} has no effect alone; also write less_than, at_most or saves")
    figure = figure or FIGURE_NAMES["peak"]
    relations = []
    if saves is not None:
        if not isinstance(relative_to, str):
            raise LimitError(
                f"saves={saves!r} needs a test to compare with; also write relative_to='ID', the "
                "pytest parameter id of that test"
            )
        relations.append(Relation(relative_to, figure, less_bytes=_size(saves)))
    elif isinstance(relative_to, str):
        relations.append(Relation(relative_to, tolerance=tolerance))
    if isinstance(less_than, str):
        relations.append(Relation(less_than, figure, strictly=True))
    if at_most is not None:
        factor = _FACTOR.fullmatch(at_most) if isinstance(at_most, str) else None
        if factor is None:
            raise LimitError(
                f"at_most={at_most!r} must be a factor and the id of a pytest parameter; write "
                "e.g. at_most='0.5 x eager'"
            )
        relations.append(Relation(factor[2], figure, factor=Fraction(factor[1])))
    return relations


def _size(value: object) -> int:
    try:
        if not isinstance(value, str):
            raise SizeError
        return parse_size(value)
    except SizeError:
        raise LimitError(
            f"saves={value!r} is not a memory size; write a number with its unit, e.g. saves='100 "
            "MB'"
        ) from None


@dataclass(frozen=True)
class ComparedRegion:
    """A region of the other test, and the facts of the process that measured it."""

    record: RegionRecord
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class RelationLimit(Limit):
    """A relation to the region of the same label in another test.

    It is judged at once if that test has run in this process, otherwise when all tests have run.
    """

    relation: Relation
    reference: str
    """The other test."""
    find: Callable[[str], ComparedRegion | None] = field(compare=False)
    """Returns its region of a label, if it has been measured here."""
    facts: Mapping[str, Any] = field(compare=False)
    """Of this process."""

    @property
    def addition(self) -> str:
        figure = self.relation.figure
        return FIGURES[figure].measured_by if figure else ""

    @property
    def judges_device(self) -> bool:
        return not self.relation.figure or FIGURES[self.relation.figure].of_device

    def judge(self, record: RegionRecord) -> Verdict:
        """Return the first of :meth:`verdicts`."""
        return next(iter(self.verdicts(record)), None)

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        """Return what :meth:`compared` does, or that the other test has not run yet."""
        other = self.find(record.label)
        if other is None:
            return [Unjudged(self.text, f"{self.reference} has not run yet")]
        return self.compared(record, other)

    def pending(self, record: RegionRecord) -> dict[str, Any] | None:
        """Return what judges a region later, in builtin types; None if it was judged."""
        if not record.completed or self.find(record.label) is not None:
            return None
        relation = self.relation
        return {
            "label": record.label,
            "text": self.text,
            "warns": self.warns,
            "reference": self.reference,
            "other": relation.other,
            "figure": relation.figure,
            "factor": str(relation.factor),
            "less_bytes": relation.less_bytes,
            "strictly": relation.strictly,
            "tolerance": relation.tolerance.text if relation.tolerance else None,
        }

    def compared(self, record: RegionRecord, other: ComparedRegion) -> Sequence[Verdict]:
        """Return a breach for each figure that is too high, and what cannot be compared."""
        others, own = fingerprint_of(other.facts), fingerprint_of(self.facts)
        if (others.device, others.meter) != (own.device, own.meter):
            return [self._breach(None, 0, f"{self.reference} ran on another device ({others})")]
        facts = changed(conditions_of(other.facts), conditions_of(self.facts))
        if not self.relation.figure:
            return self._each(record, other.record, facts)
        return [self._one(record, other.record, facts)]

    def missing(self) -> Breach:
        """Return the breach of a region whose other test was not measured at all."""
        return self._breach(
            None, 0, f"{self.reference} has no completed region of this name; run both tests"
        )

    def _one(self, record: RegionRecord, other: RegionRecord, facts: Sequence[Changed]) -> Verdict:
        relation, row = self.relation, FIGURES[self.relation.figure]
        undecided = depending_on(facts).get(relation.figure)
        name = relation.figure
        if undecided:  # a figure in its place is the same on both machines
            rows = COMPARED.items()
            name = next((it for it, row in rows if row.in_place_of == relation.figure), "")
            if not name or None in (getattr(record, name), getattr(other, name)):
                return Unjudged(self.text, f"{row.noun} is not comparable: {listed(undecided)}")
        new, old = getattr(record, name), getattr(other, name)
        if None in (new, old) and relation.figure == FIGURE_NAMES["growth"]:
            return self._breach(None, 0, f"{row.noun} is not known; run at least 5 full batches")
        if new is None or old is None:
            return Unjudged(self.text, row.unknown_because)
        allowed = relation.allowed_bytes(old)
        if new <= allowed:
            return None
        above = new - max(0, allowed) - int(relation.strictly)
        return self._breach(
            new,
            max(0, int(allowed)),
            f"{FIGURES[name].noun} {format_exact(new)}, {self._wanted(old)}: "
            f"{f'{format_exact(above)} too much' if above else 'it is equal'}",
        )

    def _wanted(self, old: float) -> str:
        relation, whose = self.relation, f"{self.reference}'s {format_exact(old)}"
        if relation.strictly:
            return f"must be less than {whose}"
        if relation.less_bytes:
            return f"must be {format_exact(relation.less_bytes)} less than {whose}"
        return f"allowed {float(relation.factor):g} x {whose}"

    def _each(
        self, record: RegionRecord, other: RegionRecord, facts: Sequence[Changed]
    ) -> Sequence[Verdict]:
        old, new = ({name: getattr(it, name) for name in COMPARED} for it in (other, record))
        tolerance = self.relation.tolerance or parse_tolerance("0%")
        verdicts: list[Verdict] = []
        for it in differences(old, new, tolerance, facts):
            noun = COMPARED[it.figure].noun
            if it.new_bytes is None:
                text = f"{noun} is not known, {format_exact(it.old_bytes)} in {self.reference}"
                verdicts.append(self._breach(None, 0, text, it.figure))
            elif it.broken:
                text = excess(it, tolerance, self.reference)
                verdicts.append(self._breach(it.new_bytes, it.allowed_bytes, text, it.figure))
        for figure, changes, _ in not_comparable(old, facts):
            text = f"{self.text}: {COMPARED[figure].noun}"
            verdicts.append(Unjudged(text, f"not comparable: {listed(changes)}"))
        return verdicts

    def _breach(
        self, measured: float | None, allowed: int, message: str, figure: str = ""
    ) -> Breach:
        if measured is None:
            message = f"cannot be judged: {message}"
        figure = figure or self.relation.figure or next(iter(COMPARED))
        return Breach(self.text, allowed, measured, message, figure, self.warns)


def limit_from_dict(data: Mapping[str, Any], facts: Mapping[str, Any]) -> RelationLimit:
    """Return the limit of :meth:`RelationLimit.pending`; `facts` are those of its process."""
    tolerance = data["tolerance"]
    relation = Relation(
        data["other"],
        data["figure"],
        Fraction(data["factor"]),
        data["less_bytes"],
        None if tolerance is None else parse_tolerance(tolerance),
        data["strictly"],
    )
    limit = RelationLimit(data["text"], relation, data["reference"], lambda label: None, facts)
    return replace(limit, warns=data["warns"])


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
            other = _other_region(regions.get(nodeid, ()), worker, label, facts)
            return None if other is None else other.record

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
    ended = [it for it in regions if it["label"] == label and it["completed"]]
    ended.sort(key=lambda region: region["worker"] != worker)
    if not ended:
        return None
    return ComparedRegion(Result.from_dict(ended[0]).record, facts[ended[0]["worker"]])
