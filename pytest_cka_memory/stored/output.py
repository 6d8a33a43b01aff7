"""The baseline file at the end of a session: update it or prune it on request, list stale lines."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cka_memory.core.conditions import conditions_of, fingerprint_of
from pytest_cka_memory.core.fixture_names import is_fixture
from pytest_cka_memory.core.report import Report, file_of
from pytest_cka_memory.reports import files
from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.stored import baselines
from pytest_cka_memory.stored.baselines import BaselineKey, Entries, Figures
from pytest_cka_memory.stored.plan import BaselinePlan
from pytest_cka_memory.stored.update import (
    Measured,
    Update,
    as_lines,
    gone_regions,
    measured_entries,
    moved,
    renames,
    seen_regions,
    updated,
)
from pytest_cka_memory.units import counted

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
        measured = _by_device(report)
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
        lines += _named_renames(renamed)
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
                "collect everything beside them; run it without paths, names of tests and "
                "--last-failed:"
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


def _named_renames(renamed: Mapping[str, str]) -> Iterator[str]:
    for old, new in sorted(renamed.items()):
        yield f"baseline: renamed (all figures are equal): {one_line(f'{old} -> {new}')}"


def _by_device(report: Report) -> list[Measured]:
    """Return each result with what identifies its line, because the cards of workers may differ."""
    on = {
        worker: (fingerprint_of(facts), conditions_of(facts))
        for worker, facts in report.facts.items()
    }
    return [
        (BaselineKey(result.nodeid, result.record.label, *on[result.worker]), result)
        for result in report.results
        if result.worker in on
    ]
