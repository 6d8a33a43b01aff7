"""The baseline file at the end of a session: write it on request, and list its stale lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_cka_memory.baseline import file as baseline_file
from pytest_cka_memory.baseline.file import BaselineKey, Figures
from pytest_cka_memory.baseline.limit import BaselinePlan
from pytest_cka_memory.baseline.update import Update, gone_regions, updated
from pytest_cka_memory.core.fingerprint import Fingerprint, fingerprint_of
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import files
from pytest_cka_memory.units import counted

_MOST_NAMED = 10


@dataclass(frozen=True)
class BaselineOutput:
    """The baseline file, read before the tests run and read again before it is written."""

    plan: BaselinePlan
    option: str = "--cka-memory-baseline"

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
        if self.plan.updating:
            files.check_writable(self.plan.path)

    def write(self, report: Report) -> str:
        """Update the file if that was requested; return lines for the terminal.

        Raises:
            BaselineError: if the file has changed and cannot be read any more.
            ReportError: if the file cannot be written.
        """
        measured = _by_device(report)
        if not self.plan.updating:
            return "\n".join(self._stale(self.plan.entries, report, measured))
        # Read again, because it may have changed: a file that cannot be read must not be replaced.
        old = baseline_file.read(self.plan.path) if self.plan.path.exists() else {}
        update = updated(old, measured)
        if update.entries != old:
            files.write_whole(self.plan.path, baseline_file.render(update.entries))
        return "\n".join([self._counted(update), *self._stale(update.entries, report, measured)])

    def _counted(self, update: Update) -> str:
        if not update.added + update.changed + update.unchanged:
            return "baseline: not written, because no measured test passed"
        dropped = f", {update.dropped} dropped" if update.dropped else ""
        return (
            f"baseline: {counted(update.added, 'region')} added, {update.changed} changed, "
            f"{update.unchanged} unchanged{dropped} in {self.plan.path}"
        )

    def _stale(
        self,
        entries: Mapping[BaselineKey, Figures],
        report: Report,
        measured: Iterable[tuple[Fingerprint, Result]],
    ) -> list[str]:
        """Name the entries whose tests no longer exist, as far as this session can know."""
        seen = [
            BaselineKey(result.nodeid, result.record.label, fingerprint)
            for fingerprint, result in measured
            if result.outcome == "passed"
        ]
        devices = {fingerprint for fingerprint, _ in measured}
        lost = self._lost({key.nodeid for key in entries if key.fingerprint in devices}, report)
        gone = {key for key in entries if key.fingerprint in devices and key.nodeid in lost}
        stale = sorted(key[:2] for key in gone | gone_regions(entries, seen))
        if not stale:
            return []
        named = [f"  {nodeid} {label}".rstrip() for nodeid, label in stale[:_MOST_NAMED]]
        more = [f"  ... and {len(stale) - _MOST_NAMED} more"] if len(stale) > _MOST_NAMED else []
        head = f"{len(stale)} regions of {self.plan.path} no longer exist; delete their lines:"
        return [head, *named, *more]

    def _lost(self, nodeids: Iterable[str], report: Report) -> set[str]:
        """Return tests that no longer exist: without a file, or not in a file collected whole."""
        files_seen = set() if report.narrowed else set(map(_file_of, report.collected))
        return {
            nodeid
            for nodeid in set(nodeids) - report.collected
            if _file_of(nodeid) in files_seen or not (self.plan.root / _file_of(nodeid)).exists()
        }


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _by_device(report: Report) -> list[tuple[Fingerprint, Result]]:
    """Return each result with the fingerprint of its worker, because their cards may differ."""
    prints = {worker: fingerprint_of(facts) for worker, facts in report.facts.items()}
    return [(prints[result.worker], result) for result in report.results if result.worker in prints]
