"""A report that may be given to anyone: it names no user, no folder of this machine, no host."""

from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.places import anonymizer, in_plain_values
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result

TextChange = Callable[[str], str]


def anonymous(report: Report, root: Path) -> Report:
    """Return `report` with paths relative to `root`, and without paths that lead elsewhere.

    Files of tests in `locations` stay as they are, because GitHub needs them to find its own.
    """
    change = anonymizer(root)
    unmeasured: Counter[str] = Counter()
    for reason, count in report.unmeasured.items():
        unmeasured[change(reason)] += count
    return replace(
        report,
        session=in_plain_values(dict(report.session), change),
        results=tuple(_changed(result, change) for result in report.results),
        missing=tuple(map(change, report.missing)),
        unmeasured=dict(unmeasured),
        collected=frozenset(map(change, report.collected)),
        locations={change(nodeid): place for nodeid, place in report.locations.items()},
        problems=tuple(map(change, report.problems)),
    )


def _changed(result: Result, change: TextChange) -> Result:
    changed: Result = _in_dataclass(replace(result, extra={}), change)
    return replace(changed, extra=in_plain_values(result.extra, change))


def _in_dataclass(value: Any, change: TextChange) -> Any:
    """Return a dataclass with every text changed, also in dataclasses and tuples in it."""
    new = {}
    for name in vars(value):
        if name == "timeline":  # has numbers only, and may be long
            continue
        old = getattr(value, name)
        if old and (changed := _in_field(old, change)) != old:
            new[name] = changed
    return replace(value, **new) if new else value


def _in_field(value: Any, change: TextChange) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_in_field(item, change) for item in value)
    if isinstance(value, dict):
        return in_plain_values(value, change)
    return _in_dataclass(value, change) if is_dataclass(value) else value
