"""The tables of docs/explanation/real-cards.md: figures of real cards beside emulated ones."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent / "real_cards"))

import case as real_cards
from case import KINDS, Case, Figure
from programs_with_recordings import PROGRAMS, Program

RESULTS = Path(__file__).parent / "results" / "real-cards.json"
RECORDED = Path(__file__).parent / "results" / "recorded-programs.json"
OUTSIDE = 0.005
"""A figure that is further off is listed by itself."""


class Compared(NamedTuple):
    """A published figure and what was predicted for it."""

    case: Case
    name: str
    figure: Figure
    found_bytes: int
    blind: bool
    others: Sequence[int] = ()
    """The same, if events are late or segments at other addresses, as far as that was run."""

    @property
    def is_in_range(self) -> bool:
        """Whether it is from the lower to the upper end of the reserve."""
        sizes = (self.found_bytes, *self.others)
        return min(sizes) <= self.figure.published_bytes <= max(sizes)

    @property
    def error(self) -> float:
        """By which share the prediction is above the figure; 0 if it has the same digits."""
        equal = self.figure.is_equal(self.found_bytes)
        return 0.0 if equal else self.figure.error(self.found_bytes)

    @property
    def kind(self) -> str:
        """The kind of the figure, or else that of its case."""
        return self.figure.kind or self.case.kind

    @property
    def is_reserve(self) -> bool:
        """Whether the figure counts the reserve."""
        return "reserved" in self.figure.counts


def compared() -> list[Compared]:
    """Return each figure that was predicted, by case."""
    results = json.loads(RESULTS.read_text("utf-8"))
    found = []
    for name in real_cards.names():
        case = real_cards.load(name)
        predicted = results.get(name, {}).get("figures", {})
        for figure, published in case.figures.items():
            if figure in predicted:
                row = predicted[figure]
                blind = row["bytes"] == row["first_bytes"] and not case.seen
                others = [row["late_bytes"]] if "late_bytes" in row else []
                others += row.get("other_addresses_bytes", [])
                found.append(Compared(case, figure, published, row["bytes"], blind, others))
    return [*found, *_compared_programs()]


def _compared_programs() -> Iterator[Compared]:
    """Yield the levels at the end of each recording whose program ran as it is."""
    for program, row in _recorded():
        if "failed" in row:
            continue
        for level, counts in (("reserved", "reserved"), ("used", "allocated")):
            figure = Figure(str(row[f"{level}_bytes"]), "bytes", counts, cause=program.cause)
            case = Case(
                title=program.repository,
                source=f"https://github.com/{program.repository}",
                kind="programs",
                card=program.card,
                real="",
                torch=program.torch,
                figures={},
            )
            name = f"{program.name}, {counts}"
            size, others = row[f"{level}_bytes_here"], ()
            if level == "reserved":
                others = _other_reserves(row)
            yield Compared(case, name, figure, size, not program.seen, others)


def _recorded() -> list[tuple[Program, dict[str, Any]]]:
    """Return each program with its row of the results."""
    rows = {row["program"]: row for row in json.loads(RECORDED.read_text("utf-8"))}
    return [(each, rows[each.name]) for each in PROGRAMS if each.name in rows]


def kinds() -> str:
    """Each kind of figure: how many there are, and how far off."""
    rows = compared()
    lines = [
        (title, *_summary([row for row in rows if row.kind == kind]))
        for kind, title in KINDS.items()
        if any(row.kind == kind for row in rows)
    ]
    for name, counts in (("allocated", False), ("reserved", True)):
        counted = [row for row in rows if row.is_reserve is counts]
        lines.append((f"**{name}**", *_summary(counted)))
        for what, is_rebuilt in (("program and versions known", False), ("rebuilt", True)):
            part = [row for row in counted if bool(row.case.rebuilt) is is_rebuilt]
            lines.append((f"**{name}, {what}**", *_summary(part)))
    blind = [row for row in rows if row.blind]
    lines += [("**blind**", *_summary(blind)), ("**all**", *_summary(rows))]
    head = (
        "kind",
        "sources",
        "figures",
        "blind",
        "as printed",
        "within 0.05 %",
        "within 1 %",
        "within 3 % or in the range",
    )
    return _markdown((*head, "median off", "worst"), lines)


def _summary(rows: Sequence[Compared]) -> tuple[str, ...]:
    errors = [row.error for row in rows]
    return (
        str(len({row.case.source.split("/blob/")[0].split("/tree/")[0] for row in rows})),
        str(len(rows)),
        str(sum(row.blind for row in rows)),
        _share(row.figure.is_equal(row.found_bytes) for row in rows),
        _share(abs(error) <= 0.0005 for error in errors),
        _share(abs(error) <= 0.01 for error in errors),
        _share(abs(row.error) <= 0.03 or row.is_in_range for row in rows),
        f"{median(map(abs, errors)):.3%}".replace("%", " %"),
        f"{max(errors, key=abs):+.2%}".replace("%", " %"),
    )


def _share(marks: Iterable[bool]) -> str:
    found = list(marks)
    percent = 100 * sum(found) // len(found)  # 100 % only if it is all of them
    return f"{sum(found)} ({percent} %)"


def sources() -> str:
    """Each case: its source, its card, its versions, and how far off it is."""
    results = json.loads(RESULTS.read_text("utf-8"))
    rows = compared()
    lines = []
    for name in real_cards.names():
        case = real_cards.load(name)
        own = [row for row in rows if row.case is case]
        if not own:
            continue
        equal = sum(row.figure.is_equal(row.found_bytes) for row in own)
        errors = [row.error for row in own]
        here = results[name]
        lines.append(
            (
                f"[{case.title}]({_address(case.source)}) (`{name}`)",
                case.real,
                f"{case.card}, {here['torch']}",
                f"{sum(here['seconds'].values()):.0f}",
                f"{len(own)} ({sum(row.blind for row in own)})",
                str(equal),
                f"{median(map(abs, errors)):.3%}".replace("%", " %"),
                f"{max(errors, key=abs):+.2%}".replace("%", " %"),
            )
        )
    head = ("source", "real card and versions", "emulated card, torch", "seconds")
    return _markdown((*head, "figures (blind)", "as printed", "median off", "worst"), lines)


def _address(source: str) -> str:
    return source.split(" ")[0]


def outside() -> str:
    """Each figure that is off by more than half a percent, with the cause if it is known."""
    lines = [
        (
            row.case.title,
            row.name,
            row.figure.counts,
            f"{row.figure.printed} {row.figure.unit}",
            f"{row.found_bytes / real_cards.UNITS[row.figure.unit]:,.6g}",
            f"{row.error:+.2%}".replace("%", " %"),
            _range(row),
            row.figure.cause or "not known",
        )
        for row in compared()
        if abs(row.error) > OUTSIDE
    ]
    head = (
        "case",
        "figure",
        "counts",
        "published",
        "emulated",
        "off",
        "from lower to upper",
        "cause",
    )
    return _markdown(head, lines)


def _range(row: Compared) -> str:
    """Return between what a figure lies, in its unit."""
    if not row.others:
        return "-"
    if set(row.others) == {row.found_bytes}:
        return "the same"
    sizes = (row.found_bytes, *row.others)
    unit = real_cards.UNITS[row.figure.unit]
    return f"{min(sizes) / unit:,.6g} to {max(sizes) / unit:,.6g}"


def programs() -> str:
    """Each program that ran as it is, beside the recording of a card."""
    lines = []
    for program, row in _recorded():
        if "failed" in row:
            lines.append((program.name, row["torch"], *("-",) * 5, row["failed"]))
            continue
        events, equal = row["events"], row["equal_events"]
        differs = row["reserved_bytes"] != row["reserved_bytes_here"] or row["differences"]
        if row.get("equal_but_for_order_of_frees", equal == events):
            shown = f"{events:,} of {events:,}"
            if equal < events:
                shown += ", frees that follow each other in another order"
        else:
            shown = f"the first {equal:,} of {events:,}"
        lines.append(
            (
                program.name,
                row["torch"],
                shown,
                f"{row['reserved_bytes']:,}",
                _less(row["reserved_bytes_here"] - row["reserved_bytes"]),
                _less(row["used_bytes_here"] - row["used_bytes"]),
                _other_addresses(row),
                program.cause if row["used_bytes"] != row["used_bytes_here"] or differs else "-",
            )
        )
    head = ("program", "torch here", "requests and frees that are equal")
    return _markdown(
        (
            *(*head, "reserved at the end, card", "emulated", "in use, emulated"),
            *("reserved with other addresses", "cause"),
        ),
        lines,
    )


def _other_addresses(row: dict[str, Any]) -> str:
    sizes = [*_other_reserves(row), row["reserved_bytes_here"]]
    if len(set(sizes)) == 1:
        return "-"
    return f"{min(sizes):,} to {max(sizes):,} (torch {row['by_address_order']['torch']})"


def _other_reserves(row: dict[str, Any]) -> list[int]:
    """Return the reserve of further runs, and with segments at other addresses."""
    others = (row.get(name, {}) for name in ("repeated", "by_address_order"))
    return [size for found in others for size in found.get("reserved_bytes", ())]


def _less(difference: int) -> str:
    return f"{difference:+,}" if difference else "the same"


def missing() -> str:
    """Each process of a case that gave no figure, and why."""
    results = json.loads(RESULTS.read_text("utf-8"))
    lines = [
        (real_cards.load(name).title, run, reason.replace("|", "\\|"))
        for name, found in results.items()
        for run, reason in found.get("failed", {}).items()
    ]
    if not lines:
        return "Each process of each case gave its figures."
    return _markdown(("case", "run", "why it gave no figure"), lines)


def conditions() -> str:
    """What each case does otherwise than its source, and why some are not blind."""
    lines = []
    for name in real_cards.names():
        case = real_cards.load(name)
        notes = (case.differs, case.rebuilt, case.seen, case.takes)
        if any(notes):
            lines.append((case.title, *(note or "-" for note in notes)))
    head = ("case", "differs from the source", "not known of the source", "why it is not blind")
    return _markdown((*head, "why it takes over ten minutes"), lines)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "real cards by kind": kinds,
    "real cards by source": sources,
    "real cards further off": outside,
    "real cards, programs with recordings": programs,
    "real cards without figures": missing,
    "real cards, conditions": conditions,
}
"""Name of each table of the page -> what draws it."""
