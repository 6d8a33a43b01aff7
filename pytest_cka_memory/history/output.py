"""Append a session to the history (``--cka-memory-history``)."""

from dataclasses import dataclass, field
from pathlib import Path

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.history import file as history_file
from pytest_cka_memory.history.commit import checked_out
from pytest_cka_memory.reports import files
from pytest_cka_memory.units import counted


@dataclass
class HistoryOutput:
    """The file to which a session appends one line."""

    path: Path
    root: Path
    """A folder of the repository whose commit is recorded."""
    option: str = "--cka-memory-history"
    is_public = True
    _commit: tuple[str | None, bool] = field(default=(None, False), init=False)

    def check(self) -> None:
        """Check that the file can be read and written, and find out the commit.

        Raises:
            ReportError: if it has a line that is not a session, or cannot be written.
        """
        if self.path.exists():
            history_file.read(self.path)
        files.check_writable(self.path)
        # Now, because somebody may check out another commit while the tests run.
        self._commit = checked_out(self.root, self.path)

    def write(self, report: Report) -> str:
        """Append the session; return a line for the terminal.

        Raises:
            ReportError: if the file cannot be written; it is then as it was.
        """
        session = history_file.session_of(report, *self._commit)
        regions = sum(len(device.regions) for device in session.devices)
        if not regions:
            return "history: not written, because no region was measured"
        files.append_line(self.path, session.to_line())
        return f"history: {counted(regions, 'region')} of {session.name} added to {self.path}"
