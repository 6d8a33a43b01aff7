"""The history of a project: a file of sessions, one a line, each with its commit."""

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pytest_cka_memory.core.conditions import Conditions, Fingerprint, machines_of
from pytest_cka_memory.core.decoder import (
    RepeatedKeyError,
    ShapeError,
    bytes_of,
    conflict_in,
    decode,
    is_other_version,
    shown,
    unique_keys,
)
from pytest_cka_memory.core.figures import rounded_figures
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.reports import files
from pytest_cka_memory.units import counted

SCHEMA = "pytest-cka-memory-history/1"


@dataclass(frozen=True)
class HistoryRegion:
    """One region of a session."""

    nodeid: str
    label: str
    figures: dict[str, int | None]
    """Name of a figure -> bytes, as in baselines; None if it was not determined."""


@dataclass(frozen=True)
class HistoryDevice:
    """What one device has measured; the fields of a fingerprint, and the regions."""

    device: str
    meter: str
    torch: str | None
    cuda: str | None
    regions: tuple[HistoryRegion, ...]
    conditions: dict[str, str] | None = None
    """The facts that figures depend on besides; None in lines of older versions."""


@dataclass(frozen=True)
class HistorySession:
    """One line of the file."""

    commit: str | None
    """Full name of the commit that was checked out; None outside a repository."""
    uncommitted: bool
    """Whether tracked files differed from that commit."""
    date: str
    """Start of the session, in UTC, as ISO 8601 writes it."""
    devices: tuple[HistoryDevice, ...]

    @property
    def day(self) -> str:
        """The date without the time."""
        return self.date[:10]

    @property
    def name(self) -> str:
        """The commit, shortened, or the date if there is none."""
        if self.commit is None:
            return f"the session of {self.date}"
        return f"{self.commit[:10]}{' with uncommitted changes' if self.uncommitted else ''}"

    def to_line(self) -> str:
        """Return the session as a line of the file, without the line break."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False)


def session_of(report: Report, commit: str | None, uncommitted: bool) -> HistorySession:
    """Return what the history keeps of a session: every region that ran to its end."""
    regions: dict[tuple[Fingerprint, Conditions | None], list[HistoryRegion]] = {}
    machines = machines_of(report.facts)
    for result in report.results:
        if result.record.completed and result.worker in machines:
            figures = rounded_figures(result.record)
            region = HistoryRegion(result.nodeid, result.record.label, figures)
            regions.setdefault(machines[result.worker], []).append(region)
    devices = tuple(
        HistoryDevice(*fingerprint, tuple(of_device), dict(conditions) if conditions else None)
        for (fingerprint, conditions), of_device in regions.items()
    )
    return HistorySession(commit, uncommitted, report.session["started"], devices)


def read(path: Path) -> list[HistorySession]:
    """Read a history, in the order of its dates.

    Raises:
        ReportError: naming the file, the line and what is wrong with it.
    """
    sessions = []
    for number, line in enumerate(bytes_of(path, ReportError).split(b"\n"), 1):
        try:
            sessions += [_session(line)] if line.strip() else []
        except ReportError as error:
            raise ReportError(f"cannot use {path}, line {number}: {error}") from None
    return sorted(sessions, key=lambda session: session.date)


def _refuse_negative(session: HistorySession) -> None:
    for device in session.devices:
        for region in device.regions:
            for name, size in region.figures.items():
                if (size or 0) < 0:
                    raise ShapeError("a whole number of bytes of at least 0", size).within(name)


def _session(content: bytes) -> HistorySession:
    try:
        line = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ReportError("not UTF-8; remove the line") from None
    conflict = conflict_in(line)
    if conflict is not None:
        raise ReportError(
            f"the file has an unresolved merge conflict ({conflict[1]!r}); keep the lines of both "
            "sides, and remove the marker lines (<<<<<<<, =======, >>>>>>>)"
        )
    try:
        data = json.loads(line, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ReportError(
            f"not valid JSON: {error.msg}; if a session was killed while it wrote this line, "
            "remove it"
        ) from None
    except RepeatedKeyError as error:
        raise ReportError(f"{error}; remove the line") from None
    except (RecursionError, ValueError):
        raise ReportError(
            "the line has values that no session writes, such as a number with thousands of "
            "digits; remove the line"
        ) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        if is_other_version(schema, SCHEMA):
            raise ReportError(
                f"its schema is {schema}, but this plugin reads {SCHEMA}; upgrade the plugin"
            )
        raise ReportError(
            f"{shown(data)} is not a line of a history file, because its schema is not {SCHEMA!r}; "
            "remove the line, or name a file that --cka-memory-history wrote"
        )
    try:
        session: HistorySession = decode(HistorySession, data, "")
        _refuse_negative(session)
    except ShapeError as error:
        raise ReportError(f"{error}; remove the line") from None
    return session


_SECONDS = 20


def checked_out(folder: Path, ignored: Path) -> tuple[str | None, bool]:
    """Return the commit checked out in `folder`, and whether tracked files differ from it.

    A change of the file `ignored` does not count: it is the history itself, which may be tracked.
    The commit is None outside a repository, before its first commit, and without git.
    """
    answer = _git(folder, "rev-parse", "--show-toplevel", "HEAD")
    if answer is None:
        return None, False
    top, commit = answer.splitlines()
    changed = _git(folder, "diff-index", "--name-only", "-z", "HEAD", "--") or ""
    own = os.path.relpath(ignored.resolve(), Path(top).resolve()).replace(os.sep, "/")
    return commit, any(name not in ("", own) for name in changed.split("\0"))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it is not installed or refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "surrogateescape")


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
            read(self.path)
        files.check_writable(self.path)
        # Now, because somebody may check out another commit while the tests run.
        self._commit = checked_out(self.root, self.path)

    def write(self, report: Report) -> str:
        """Append the session; return a line for the terminal.

        Raises:
            ReportError: if the file cannot be written; it is then as it was.
        """
        session = session_of(report, *self._commit)
        regions = sum(len(device.regions) for device in session.devices)
        if not regions:
            return "history: not written, because no region was measured"
        files.append_line(self.path, session.to_line())
        return f"history: {counted(regions, 'region')} of {session.name} added to {self.path}"
