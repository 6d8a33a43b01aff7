"""The comparison of two reports as text, Markdown or JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from pytest_cka_memory.core.conditions import listed
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.core.two_reports import Change, Comparison, RegionKey
from pytest_cka_memory.reports import markdown, summary
from pytest_cka_memory.reports.escapes import code, one_line, sentence
from pytest_cka_memory.reports.names import fitted
from pytest_cka_memory.units import counted, format_size

_HEAD = ("figure", "old", "new", "change", "verdict")
_MOST_ROWS = 200
_MOST_NAMED = 10
_LEAST_NAME = 16


def verdict(found: Comparison) -> str:
    """Return the outcome in one line."""
    worse = len({change.key for change in found.regressions})
    regions = counted(found.compared, "region")
    outcome = (
        f"{worse:,} of {regions} rose by more than {found.tolerance.text}"
        if worse
        else f"none of {regions} rose by more than {found.tolerance.text}"
    )
    lists = {"new": found.appeared, "gone": found.vanished, "not judged": found.incomplete}
    return ", ".join([outcome, *(f"{len(keys):,} {what}" for what, keys in lists.items() if keys)])


def as_table(found: Comparison, width: int = 100) -> str:
    """Return lines for a terminal: every change, regressions first.

    Names of regions are shortened where the table would be wider than `width`.
    """
    from tabulate import tabulate  # takes 20 ms, and every session imports this module

    changes = cut(found.changes, _MOST_ROWS)
    figures = [cells(change) for change in changes]
    lines = []
    if changes:
        others = sum(2 + max(map(len, column)) for column in zip(_HEAD, *figures, strict=True))
        room = max(_LEAST_NAME, width - others)
        names = fitted([one_line(change.key.name) for change in changes], room)
        rows = [(name, *row) for name, row in zip(names, figures, strict=True)]
        align = ("left", "left", "right", "right", "right", "left")
        lines = tabulate(
            [("region", *_HEAD), *rows], tablefmt="plain", disable_numparse=True, colalign=align
        ).splitlines()
        lines += [*_left_out(found), ""]
    lines += [one_line(remark) for remark in remarks(found)]
    return "\n".join([*lines, f"compared: {verdict(found)}", ""])


def as_markdown(found: Comparison) -> str:
    """Return GitHub-flavoured Markdown, short enough for a comment."""
    room = markdown.COMMENT_CHARACTERS * 2 // 3
    is_long = len(found.changes) > _MOST_ROWS
    changes = _one_of_each_first(found.changes) if is_long else found.changes
    rows = [
        (code(change.key.name), COMPARED[change.difference.figure].noun, *cells(change)[1:])
        for change in changes
    ]
    words = [(name, result, figure, *rest) for name, figure, *rest, result in rows]
    head = ("region", "verdict", *_HEAD[:-1])
    lines = [f"### Memory compared: {sentence(verdict(found))}", ""]
    lines += markdown.table(head, words, room, left=3) if words else []
    lines += [f"- {sentence(remark)}" for remark in remarks(found)]
    return "\n".join(lines).rstrip() + "\n"


def as_json(found: Comparison) -> str:
    """Return all of it as JSON."""
    plain = {
        "tolerance": found.tolerance.text,
        "compared": found.compared,
        "regressions": len(found.regressions),
        "changes": [
            {
                **change.key._asdict(),
                **asdict(change.difference),
                "regression": change.difference.broken,
            }
            for change in found.changes
        ],
        "not_judged": [key._asdict() for key in found.incomplete],
        "appeared": [key._asdict() for key in found.appeared],
        "vanished": [key._asdict() for key in found.vanished],
        "figures_not_compared": list(found.not_on_both),
        "figures_undecided": list(found.undecided),
        "conditions": [fact._asdict() for fact in found.changed],
        "differing": [{"old": old, "new": new} for old, new in found.devices],
    }
    return json.dumps(plain, indent=1) + "\n"


def cut(changes: Sequence[Change], most: int) -> Sequence[Change]:
    """Return at most so many changes, regressions first: one of each test before any second."""
    return changes if len(changes) <= most else _one_of_each_first(changes)[:most]


def _one_of_each_first(changes: Sequence[Change]) -> list[Change]:
    ordered = summary.first_of_each(changes, lambda change: change.key.nodeid)
    return sorted(ordered, key=lambda change: not change.difference.broken)


def share_of_change(old: float, new: float) -> str:
    """Return ``+6.9%``; if there is nothing to compare with, the new size: ``+900 B``."""
    return f"{(new - old) / abs(old):+.1%}" if old else f"+{format_size(new)}"


def cells(change: Change) -> tuple[str, str, str, str, str]:
    """Return figure, old and new size, change and verdict of one change."""
    difference = change.difference
    old, new = difference.old_bytes, difference.new_bytes
    step = "-" if new is None else share_of_change(old, new)
    result = "REGRESSION" if difference.broken else "within" if new is None or new > old else "less"
    noun = COMPARED[difference.figure].noun
    return noun, format_size(old), format_size(new), step, result


def _left_out(found: Comparison) -> list[str]:
    left = len(found.changes) - _MOST_ROWS
    return [f"and {left:,} more; --format json prints all"] if left > 0 else []


def remarks(found: Comparison) -> Iterator[str]:
    """Yield what differs besides figures, and what was not compared."""
    for old, new in found.devices:
        yield f"warning: the reports differ in more than the code: measured on {old}, now on {new}"
    if found.undecided:
        nouns = ", ".join(COMPARED[figure].noun for figure in found.undecided)
        yield (
            f"not compared, because of {listed(found.changed)}: {nouns}; what does not depend on "
            "it is. To compare all figures, measure both reports on one machine"
        )
    if found.not_on_both:
        nouns = ", ".join(COMPARED[figure].noun for figure in found.not_on_both)
        yield f"not compared, because only one of the devices has it: {nouns}"
    yield from _named("only in the new report", found.appeared)
    yield from _named("only in the old report", found.vanished)
    yield from _named("not compared, because an exception ended it", found.incomplete)


def _named(what: str, keys: Sequence[RegionKey]) -> Iterator[str]:
    yield from (f"{what}: {key.name}" for key in keys[:_MOST_NAMED])
    if len(keys) > _MOST_NAMED:
        yield f"{what}: {len(keys) - _MOST_NAMED:,} more"
