"""The file of baselines at the end of a session: updated or pruned on request; stale lines."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_cka_memory.core.conditions import machines_of
from pytest_cka_memory.core.figures import COMPARED, rounded_figures
from pytest_cka_memory.core.report import Report, file_of, is_fixture
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import files, laid_out, one_line
from pytest_cka_memory.stored import BaselinePlan, baselines
from pytest_cka_memory.stored.baselines import BaselineKey, Entries, Figures, Value, law_figure
from pytest_cka_memory.units import counted, format_with_unit

_MOST_SHOWN = 30


class BaselineChange(NamedTuple):
    """A figure whose baseline has changed."""

    key: BaselineKey
    figure: str
    old_bytes: int | None
    """None if the figure was not determined, which happens to growth only."""
    new_bytes: int | None

    @property
    def rise_bytes(self) -> int:
        """The rise; negative if the figure fell."""
        return (self.new_bytes or 0) - (self.old_bytes or 0)


def changes(
    old: Mapping[BaselineKey, Figures], new: Mapping[BaselineKey, Figures]
) -> tuple[BaselineChange, ...]:
    """Return every figure whose value in `new` differs from that in `old`, largest rise first."""
    changed = [
        BaselineChange(key, figure, old[key].get(figure), figures.get(figure))
        for key, figures in new.items()
        if key in old
        for figure, row in COMPARED.items()
        if old[key].get(figure) != figures.get(figure)
        # A figure that may replace another shows nothing new if that one has changed as well.
        if not row.in_place_of or old[key].get(row.in_place_of) == figures.get(row.in_place_of)
    ]
    return tuple(sorted(changed, key=lambda change: -change.rise_bytes))


def as_lines(changed: Sequence[BaselineChange]) -> list[str]:
    """Return a line per change, for the terminal; the middle is left out if there are many."""
    if len(changed) <= _MOST_SHOWN:
        return _table(changed)
    half = _MOST_SHOWN // 2  # the largest rises and the largest falls
    lines = _table([*changed[:half], *changed[-half:]])
    return [*lines[:half], f"  ... and {len(changed) - 2 * half} more", *lines[half:]]


def _table(changed: Iterable[BaselineChange]) -> list[str]:
    return [f"  {line}".rstrip() for line in laid_out([[*_cells(it)] for it in changed], "llrlrrl")]


def _cells(change: BaselineChange) -> Iterator[str]:
    old, new = change.old_bytes, change.new_bytes
    yield one_line(f"{change.key.nodeid} {change.key.label}".rstrip())
    yield COMPARED[change.figure].noun
    sizes = [format_with_unit(old), format_with_unit(new)]
    if sizes[0] == sizes[1]:  # the change is too small for two decimals
        sizes = [f"{old:,} B", f"{new:,} B"]
    yield from (sizes[0], "->", sizes[1])
    if old is None or new is None:
        yield from ("", "known now" if old is None else "not known now")
    else:
        from pytest_cka_memory.reports.tables import share_of_change  # few sessions need it

        share = share_of_change(old, new) if old else ""
        yield from (share, "up" if new > old else "down")


_Signature = frozenset[tuple[BaselineKey, tuple[tuple[str, Value], ...]]]


def renames(
    old: Mapping[BaselineKey, Figures],
    gone: Collection[str],
    measured: Mapping[BaselineKey, Figures],
) -> dict[str, str]:
    """Return old name -> new name of every test that was certainly renamed or moved.

    All regions of both tests must have the same labels, devices and figures. A test that was moved
    to another file must have kept its name; a test that was renamed must have kept its file. If
    both changed, some figure must not be 0, and no other test may have the same figures.

    Args:
        old: the entries of the baseline file.
        gone: tests in it that no longer exist.
        measured: what this session measured.
    """
    known = {key.nodeid for key in old}
    # Lines of other machines move with those of this one, but cannot be compared.
    machines = {
        (key.fingerprint, conditions) for key in measured for conditions in (key.conditions, None)
    }
    before = _by_signature(
        {
            key: figures
            for key, figures in old.items()
            if key.nodeid in gone and (key.fingerprint, key.conditions) in machines
        }
    )
    after = _by_signature({k: f for k, f in measured.items() if k.nodeid not in known})
    new_names: dict[str, str] = {}
    for signature, left in before.items():
        has_sizes = any(size for _, figures in signature for _, size in figures)
        new_names |= _pairs(left, after.get(signature, []), has_sizes)
    return new_names


def moved(entries: Mapping[BaselineKey, Figures], renamed: Mapping[str, str]) -> Entries:
    """Return the entries of renamed tests under their new names."""
    return {
        key._replace(nodeid=renamed[key.nodeid]): figures
        for key, figures in entries.items()
        if key.nodeid in renamed
    }


def _by_signature(entries: Mapping[BaselineKey, Figures]) -> dict[_Signature, list[str]]:
    regions: dict[str, set[tuple[BaselineKey, tuple[tuple[str, Value], ...]]]] = {}
    for key, figures in entries.items():
        unnamed = key._replace(nodeid="", conditions=None)
        regions.setdefault(key.nodeid, set()).add((unnamed, tuple(sorted(figures.items()))))
    nodeids: dict[_Signature, list[str]] = {}
    for nodeid, signature in regions.items():
        nodeids.setdefault(frozenset(signature), []).append(nodeid)
    return nodeids


def _pairs(before: Iterable[str], after: Iterable[str], has_sizes: bool) -> dict[str, str]:
    left, new = list(before), list(after)
    new_names: dict[str, str] = {}
    # What must be equal: the name of the test, its file, and if figures are enough, nothing.
    parts: list[Callable[[str], str]] = [lambda nodeid: nodeid.rpartition("::")[2], file_of]
    parts += [lambda _: ""] if has_sizes else []
    for part_of in parts:
        for part in {part_of(nodeid) for nodeid in left}:
            olds = [nodeid for nodeid in left if part_of(nodeid) == part]
            news = [nodeid for nodeid in new if part_of(nodeid) == part]
            if len(olds) == len(news) == 1:
                new_names[olds[0]] = news[0]
        left = [nodeid for nodeid in left if nodeid not in new_names]
        new = [nodeid for nodeid in new if nodeid not in new_names.values()]
    return new_names


@dataclass(frozen=True)
class Update:
    """The new entries, and how many regions were added, changed, left or dropped."""

    entries: Entries
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    dropped: int = 0
    changes: tuple[BaselineChange, ...] = ()
    """Every figure of the changed regions that rose or fell."""


Measured = tuple[BaselineKey, Result]
"""A region, and what identifies its line."""


def updated(old: Mapping[BaselineKey, Figures], measured: Iterable[Measured]) -> Update:
    """Return `old` with the regions of every test that passed; everything else stays.

    A region that such a test no longer opens is dropped, for the same fingerprint only; so is a
    line that another machine has recorded of other code, and one that has no conditions. If a
    region was measured more than once, as with ``--dist=each``, the highest figures count.
    """
    results = list(measured)
    fresh = measured_entries(results)
    gone = gone_regions(old, seen_regions(results)) | _outdated(old, fresh)
    old = _with_conditions(old, fresh)
    return Update(
        {**{key: figures for key, figures in old.items() if key not in gone}, **fresh},
        added=len(fresh.keys() - old.keys()),
        changed=sum(key in old and old[key] != figures for key, figures in fresh.items()),
        unchanged=sum(old.get(key) == figures for key, figures in fresh.items()),
        dropped=len(gone),
        changes=changes(old, fresh),
    )


def _with_conditions(old: Mapping[BaselineKey, Figures], fresh: Iterable[BaselineKey]) -> Entries:
    """Return `old` with the conditions of the fresh lines in those that have none."""
    known = {key._replace(conditions=None): key for key in fresh}
    return {known.get(key, key): figures for key, figures in old.items()}


def _outdated(
    old: Mapping[BaselineKey, Figures], fresh: Mapping[BaselineKey, Figures]
) -> set[BaselineKey]:
    """Return lines of other machines whose figures differ where machines do not matter."""
    now = {key._replace(conditions=None): figures for key, figures in fresh.items()}
    return {
        key
        for key, figures in old.items()
        if key not in fresh and key.conditions is not None
        if (current := now.get(key._replace(conditions=None))) is not None
        if any(figures.get(name) != current.get(name) for name in _ON_EVERY_MACHINE)
    }


_ON_EVERY_MACHINE = [name for name, row in COMPARED.items() if "threads" not in row.depends_on]


def measured_entries(measured: Iterable[Measured]) -> Entries:
    """Return the figures of every region that ran to its end in a test that passed."""
    entries: Entries = {}
    for key, result in measured:
        if result.outcome == "passed" and result.record.completed:
            highest = _highest(entries.get(key, {}), rounded_figures(result.record))
            law = law_figure(result.record)
            entries[key] = {**highest, **law}
    return entries


def seen_regions(measured: Iterable[Measured]) -> list[BaselineKey]:
    """Return the regions of tests that passed, also those that an exception ended."""
    return [key for key, result in measured if result.outcome == "passed"]


def _highest(figures: Figures, other: Figures) -> Figures:
    return {
        name: max((f for f in (figures.get(name), other[name]) if f is not None), default=None)
        for name in other
    }


def gone_regions(entries: Iterable[BaselineKey], seen: Collection[BaselineKey]) -> set[BaselineKey]:
    """Return entries of tests in `seen` that did not open this region this time."""
    regions = {key._replace(conditions=None) for key in seen}
    tests = {(key.nodeid, key.fingerprint) for key in regions}
    return {
        key
        for key in entries
        if (key.nodeid, key.fingerprint) in tests and key._replace(conditions=None) not in regions
    }


_MOST_NAMED = 10


@dataclass(frozen=True)
class BaselineOutput:
    """The baseline file, read before the tests run and read again before it is written."""

    plan: BaselinePlan
    option: str = "--cka-memory-baseline"
    is_public = False
    """Later sessions compare its names of tests with theirs, so nothing in them is replaced."""

    @property
    def path(self) -> Path:
        """The baseline file, which a report must not overwrite."""
        return self.plan.path

    def check(self) -> None:
        """Check that the file can be read and, for an update, written.

        Raises:
            BaselineError: if it cannot be read.
            ReportError: if it cannot be written.
        """
        _ = self.plan.entries
        if self.plan.updating or self.plan.pruning:
            files.check_writable(self.plan.path)

    def write(self, report: Report) -> str:
        """Update and prune the file if that was requested; return lines for the terminal.

        Raises:
            BaselineError: if the file has changed and cannot be read any more.
            ReportError: if the file cannot be written.
        """
        machines = machines_of(report.facts)
        measured = [
            (BaselineKey(result.nodeid, result.record.label, *machines[result.worker]), result)
            for result in report.results
            if result.worker in machines
        ]
        if not (self.plan.updating or self.plan.pruning):
            return "\n".join(self._stale(self.plan.entries, report, measured))
        # Read again, because it may have changed: a file that cannot be read must not be replaced.
        old = baselines.read(self.plan.path) if self.plan.path.exists() else {}
        update = updated(old, measured) if self.plan.updating else Update(old)
        lines = [*self._counted(update)] if self.plan.updating else []
        renamed = self._renamed(old, report, measured)
        entries = update.entries
        if self.plan.pruning:
            pruned = self._gone(entries, report, measured)
            lines += self._pruned(pruned, renamed)
            kept = {key: figures for key, figures in entries.items() if key not in pruned}
            entries = {**moved({key: entries[key] for key in pruned}, renamed), **kept}
        lines += [
            f"baseline: renamed (all figures are equal): {one_line(f'{before} -> {after}')}"
            for before, after in sorted(renamed.items())
        ]
        if entries != old:
            files.write_whole(self.plan.path, baselines.render(entries))
        return "\n".join([*lines, *self._stale(entries, report, measured)])

    def _counted(self, update: Update) -> Iterator[str]:
        if not update.added + update.changed + update.unchanged:
            yield "baseline: not written, because no measured test passed"
            return
        dropped = f", {update.dropped} dropped" if update.dropped else ""
        yield (
            f"baseline: {counted(update.added, 'region')} added, {update.changed} changed, "
            f"{update.unchanged} unchanged{dropped} in {self.plan.path}"
        )
        yield from as_lines(update.changes)

    def _gone(
        self,
        entries: Mapping[BaselineKey, Figures],
        report: Report,
        measured: Sequence[Measured],
    ) -> set[BaselineKey]:
        """Return the entries that the session has shown to be gone, for the devices it measured."""
        devices = {key.fingerprint for key, _ in measured}
        gone = {
            key
            for key in entries
            if key.fingerprint in devices
            and not is_fixture(key.nodeid)
            and key.nodeid not in report.collected
            and report.collection.shows_gone(key.nodeid, self.plan.root)
        }
        return gone | gone_regions(entries, seen_regions(measured))

    def _pruned(self, pruned: Iterable[BaselineKey], renamed: Mapping[str, str]) -> Iterator[str]:
        removed = sorted({key[:2] for key in pruned if key.nodeid not in renamed})
        if not removed:
            yield from [] if renamed else [f"baseline: no line removed from {self.plan.path}"]
            return
        lines = counted(len(removed), "region")
        yield f"baseline: {lines} removed from {self.plan.path}, because they no longer exist:"
        yield from _named(removed)

    def _renamed(
        self, old: Entries, report: Report, measured: Sequence[Measured]
    ) -> dict[str, str]:
        """Return old name -> new name of tests that were renamed."""
        if self.plan.pruning:
            gone = {key.nodeid for key in self._gone(old, report, measured)} - report.collected
        else:
            gone = self._lost({key.nodeid for key in old}, report)
        return renames(old, gone, measured_entries(measured))

    def _stale(
        self,
        entries: Mapping[BaselineKey, Figures],
        report: Report,
        measured: Sequence[Measured],
    ) -> list[str]:
        """Name the entries whose tests no longer exist, as far as this session can know."""
        devices = {key.fingerprint for key, _ in measured}
        lost = self._lost({key.nodeid for key in entries if key.fingerprint in devices}, report)
        gone = {key for key in entries if key.fingerprint in devices and key.nodeid in lost}
        stale = sorted({key[:2] for key in gone | gone_regions(entries, seen_regions(measured))})
        if not stale:
            return []
        regions = counted(len(stale), "region")
        if self.plan.pruning:
            head = (
                f"{regions} not removed from {self.plan.path}, because this session did not "
                "collect all tests beside them; to remove them, run it without paths, "
                "names of tests and --last-failed:"
            )
        else:
            head = (
                f"{regions} of {self.plan.path} no longer exist; remove them with "
                "--cka-memory-prune-baseline:"
            )
        return [head, *_named(stale)]

    def _lost(self, nodeids: Iterable[str], report: Report) -> set[str]:
        """Return tests that no longer exist: without a file, or not in a file collected whole."""
        files_seen = set() if report.narrowed else set(map(file_of, report.collected))
        return {
            nodeid
            for nodeid in set(nodeids) - report.collected
            if not is_fixture(nodeid)
            if file_of(nodeid) in files_seen or not os.path.exists(self.plan.root / file_of(nodeid))
        }


def _named(regions: Sequence[tuple[str, str]]) -> Iterator[str]:
    for nodeid, label in regions[:_MOST_NAMED]:
        yield f"  {one_line(f'{nodeid} {label}'.rstrip())}"
    if len(regions) > _MOST_NAMED:
        yield f"  ... and {len(regions) - _MOST_NAMED} more"
