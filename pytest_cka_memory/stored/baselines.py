"""Committed baselines: the file, one region a line so that git merges it, and the limit it sets."""

import json
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pytest_cka_memory.core.conditions import (
    Changed,
    Conditions,
    Fingerprint,
    conditions_of,
    listed,
)
from pytest_cka_memory.core.decoder import (
    MAX_NUMBER,
    RepeatedKeyError,
    ShapeError,
    bytes_of,
    conflict_in,
    decode,
    is_other_version,
    line_at,
    shown,
    unique_keys,
)
from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import COMPARED, RegionRecord
from pytest_cka_memory.core.relations import relations_of
from pytest_cka_memory.core.verdicts import (
    Breach,
    Difference,
    Limit,
    Tolerance,
    Unjudged,
    Verdict,
    differences,
    excess,
    not_comparable,
    parse_tolerance,
)
from pytest_cka_memory.errors import BaselineError
from pytest_cka_memory.units import format_exact

SCHEMA = "pytest-cka-memory-baseline/1"
_HEADER = {"schema": SCHEMA}
_SPACE = re.compile(r"[ \t\r\n]*")
_REPAIR = "correct the line, or restore the file from version control"

Value = Any
"""Bytes of a compared figure; None if it was not determined. Of a law its text, as JSON."""
Figures = Mapping[str, Value]
"""Name of a compared figure, or ``law`` -> its value."""
LAW = "law"


class BaselineKey(NamedTuple):
    """Identifies a region, and what it was measured on."""

    nodeid: str
    label: str
    """Empty for a whole test; the second region with the same label is ``label #2``."""
    fingerprint: Fingerprint
    conditions: Conditions | None = None
    """The facts that figures depend on besides; None in a file of an older version."""


Entries = dict[BaselineKey, Figures]

_TEXTS: list[tuple[str, Any]] = [
    ("nodeid", str),
    ("label", str),
    *Fingerprint.__annotations__.items(),
]
_NOT_NEGATIVE = Figure("", "", never_negative=True)
_Line: Any = make_dataclass(
    "_Line",
    [
        *_TEXTS,
        *(
            (name, Annotated[int | None if row.optional else int, _NOT_NEGATIVE])
            for name, row in COMPARED.items()
        ),
        ("conditions", dict[str, str] | None),
        (LAW, dict[str, Any] | None),
    ],
)
"""One region as the file has it."""
_KEYS = [field.name for field in fields(_Line)]
_NOT_IN_ALL = frozenset(
    {"conditions", LAW, *(name for name, row in COMPARED.items() if row.in_place_of)}
)
"""Keys that lines lack if the meter does not know them, and all lines of older versions."""


def render(entries: Mapping[BaselineKey, Figures]) -> str:
    """Return the text of the file that holds `entries`, sorted."""
    regions = [
        {
            "nodeid": key.nodeid,
            "label": key.label,
            **key.fingerprint._asdict(),
            **entries[key],
            **({LAW: json.loads(entries[key][LAW])} if LAW in entries[key] else {}),
            **({} if key.conditions is None else {"conditions": dict(key.conditions)}),
        }
        for key in sorted(entries, key=_order)
    ]
    lines = [f", {json.dumps(region, ensure_ascii=False)}" for region in regions]
    return "\n".join([f"[ {json.dumps(_HEADER)}", *lines, "]", ""])


def law_figure(record: RegionRecord) -> dict[str, str]:
    """Return the law of a region as the figures of a baseline have it; empty without one."""
    return {} if record.law is None else {LAW: json.dumps(record.law, ensure_ascii=False)}


def _order(key: BaselineKey) -> tuple[list[str], Conditions]:
    named = (key.nodeid, key.label, *key.fingerprint)
    return [part or "" for part in named], key.conditions or ()


def read(path: Path) -> Entries:
    """Read a baseline file.

    Raises:
        BaselineError: naming the file, the line and what is wrong with it.
    """
    content = bytes_of(path, BaselineError)
    try:
        return parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = line_at(content, error.start)
        raise BaselineError(f"cannot use {path}, {_wrong(line, 'not UTF-8')}") from None
    except BaselineError as error:
        raise BaselineError(f"cannot use {path}, {error}") from None


def parse(content: str) -> Entries:
    """Read the text of a baseline file.

    Raises:
        BaselineError: ``line 3: ...``, with what is wrong there and what to do.
    """
    conflict = conflict_in(content)
    if conflict is not None:
        raise _wrong(
            conflict[0],
            f"the file has an unresolved merge conflict ({conflict[1]!r})",
            "keep the lines of one side, then measure again with --cka-memory-update-baseline",
        )
    elements = _elements(content)
    line, header = next(elements)
    _check_header(line, header)
    entries: Entries = {}
    lines: dict[BaselineKey, int] = {}
    for line, element in elements:
        key, figures = _region(line, element)
        if key in entries:
            raise _wrong(line, f"the same region as line {lines[key]}", "keep one of the two lines")
        entries[key], lines[key] = figures, line
    return entries


def _wrong(line: int, problem: str, remedy: str = _REPAIR) -> BaselineError:
    return BaselineError(f"line {line}: {problem}; {remedy}")


def _elements(content: str) -> Iterator[tuple[int, Any]]:
    """Yield the line number and the value of each element of the array; at least one."""
    newlines = [match.start() for match in re.finditer("\n", content)]

    def line_at(position: int) -> int:
        return bisect(newlines, position - 1) + 1

    position = _after_space(content, 0)
    if content[position : position + 1] != "[":
        raise _wrong(line_at(position), _NOT_OURS, _NAME_ANOTHER)
    mark = "["
    while mark != "]":
        start = _after_space(content, position + 1)
        try:
            element, position = _DECODER.raw_decode(content, start)
        except json.JSONDecodeError as error:
            raise _wrong(line_at(error.pos), f"not valid JSON: {error.msg}") from None
        except (BaselineError, RepeatedKeyError) as error:
            raise _wrong(line_at(start), str(error)) from None
        except RecursionError:
            raise _wrong(line_at(start), "nested too deeply for a region") from None
        yield line_at(start), element
        position = _after_space(content, position)
        mark = content[position : position + 1]
        if mark == "":
            raise _wrong(line_at(position), "cut off: the last ']' is missing")
        if mark not in ",]":
            raise _wrong(line_at(position), "not valid JSON: expected ',' or the last ']' here")
    end = _after_space(content, position + 1)
    if end != len(content):
        raise _wrong(line_at(end), "text after the last ']'")


def _after_space(content: str, position: int) -> int:
    space = _SPACE.match(content, position)
    return position if space is None else space.end()


def _integer(digits: str) -> int:
    if len(digits) > len(str(MAX_NUMBER)):
        raise BaselineError(f"{digits[:12]}... has too many digits for a number of bytes")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise BaselineError(f"{name} is not a number of bytes")


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_int=_integer, parse_constant=_refuse_constant
)
_NOT_OURS = f"the file is not a baseline file; such a file begins with '[ {json.dumps(_HEADER)}'"
_NAME_ANOTHER = "name another file, or restore this one from version control"


def _check_header(line: int, header: object) -> None:
    if header == _HEADER:
        return
    schema = header.get("schema") if isinstance(header, dict) else None
    if is_other_version(schema, SCHEMA):
        raise _wrong(
            line, f"its schema is {schema}, but this plugin reads {SCHEMA}", "upgrade the plugin"
        )
    raise _wrong(line, _NOT_OURS, _NAME_ANOTHER)


def _region(line: int, element: object) -> tuple[BaselineKey, Figures]:
    if not isinstance(element, dict):
        raise _wrong(line, f"{shown(element)} is not a region")
    for name in _KEYS:
        if name not in element and name not in _NOT_IN_ALL:
            raise _wrong(line, f"{name!r} is missing")
    for name in element:
        if name not in _KEYS:
            raise _wrong(line, f"{shown(name)} is not a key of a region")
    try:
        region = decode(_Line, {**dict.fromkeys(_NOT_IN_ALL), **element}, "")
    except ShapeError as error:
        raise _wrong(line, str(error)) from None
    fingerprint = Fingerprint(*(getattr(region, name) for name in Fingerprint._fields))
    figures = {name: getattr(region, name) for name in COMPARED if name in element}
    if region.law is not None:
        figures[LAW] = json.dumps(region.law, ensure_ascii=False)
    conditions = conditions_of({"conditions": region.conditions})
    return BaselineKey(region.nodeid, region.label, fingerprint, conditions), figures


REMEDY = "write one with --cka-memory-update-baseline"


_NOT_GIVEN = object()


def tolerance_of_marker(
    tolerance: object = _NOT_GIVEN,
    *,
    relative_to: object = None,
    less_than: object = None,
    at_most: object = None,
    saves: object = None,
    of: object = None,
) -> Tolerance | None:
    """Return the tolerance of a ``memory_baseline`` marker; None if it gives none.

    Args:
        tolerance: how far a figure may rise.
        relative_to: id of a parameter; see
            :func:`~pytest_cka_memory.core.relations.relations_of` for this and the next four.
        less_than: id of a parameter.
        at_most: a factor and the id of a parameter.
        saves: a size, with `relative_to`.
        of: the figure that is compared.

    Raises:
        LimitError: if one of them cannot be read.
    """
    parsed = None if tolerance is _NOT_GIVEN else parse_tolerance(tolerance)
    relations_of(
        relative_to=relative_to,
        less_than=less_than,
        at_most=at_most,
        saves=saves,
        of=of,
        tolerance=parsed or parse_tolerance("0%"),
    )
    return parsed


@dataclass(frozen=True)
class WithinBaseline(Limit):
    """No figure may be more than the tolerance above the baseline."""

    tolerance: Tolerance
    known: Mapping[str, Figures]
    """Label -> the baseline of this test on this device."""
    device: Fingerprint | None = None
    """What the test runs on, if the baseline has no entry for it."""
    required: bool = False
    """Whether a region without a baseline breaks this limit."""
    changed: Mapping[str, Sequence[Changed]] = field(default_factory=dict)
    """Label -> facts that its figures depend on, and that are not what they were."""

    def judge(self, record: RegionRecord) -> Verdict:
        """Return the first of :meth:`verdicts`."""
        return next(iter(self.verdicts(record)), None)

    def verdicts(self, record: RegionRecord) -> list[Verdict]:
        """Return a breach per figure that is too high, and what was not judged, with the reason."""
        old, facts = self.known.get(record.label), self.changed.get(record.label, ())
        if old is None:
            return [self._without_baseline()]
        now = {name: getattr(record, name) for name in COMPARED}
        found = differences(old, now, self.tolerance, facts)
        breaches = [self._breach(difference) for difference in found if difference.broken]
        return [*breaches, *self._of_law(old, record), *self._left_out(old, facts)]

    def _of_law(self, old: Figures, record: RegionRecord) -> Iterator[Breach]:
        """Yield a breach if the region has a law that is above the committed one."""
        if LAW not in old or record.law is None:
            return
        from pytest_cka_memory.limits.laws import difference  # few baselines have a law

        try:
            message = difference(json.loads(old[LAW]), record.law)
        except (KeyError, TypeError, ValueError, IndexError):
            message = "the committed law cannot be read: update the baseline"
        if message:
            yield Breach(self.text, 0, None, message, next(iter(COMPARED)))

    def _without_baseline(self) -> Verdict:
        missing = "region" if self.device is None else f"device ({self.device})"
        reason = f"no baseline for this {missing}; {REMEDY}"
        if not self.required:
            return Unjudged(self.text, reason)
        message = f"{reason}. This fails because --cka-memory-require-baseline is given"
        return Breach(self.text, 0, None, message, next(iter(COMPARED)))

    def _left_out(self, old: Figures, facts: Sequence[Changed]) -> Iterator[Unjudged]:
        """Yield what is not judged because it depends on facts that have changed."""
        groups: dict[str, list[str]] = {}
        for figure, changes, place in not_comparable(old, facts):
            instead = "; judged without scratch memory of operators" if place else ""
            groups.setdefault(f"{listed(changes)}{instead}", []).append(COMPARED[figure].noun)
        for reason, nouns in groups.items():
            remedy = "record it for this machine with --cka-memory-update-baseline"
            yield Unjudged(f"{self.text}: {', '.join(nouns)}", f"{reason}; {remedy}")

    def _breach(self, difference: Difference) -> Breach:
        old, new, allowed = difference.old_bytes, difference.new_bytes, difference.allowed_bytes
        noun = COMPARED[difference.figure].noun
        if new is None:
            message = (
                f"cannot be judged: {noun} is {format_exact(old)} in the baseline, but it is not "
                "known now; run at least 5 full batches, or update the baseline"
            )
        else:
            message = excess(difference, self.tolerance, "the baseline")
        return Breach(self.text, allowed, new, message, difference.figure)
