"""The file of a history: one JSON object per line, one line per session; lines are only added."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_cka_memory.core.conditions import Conditions, Fingerprint, conditions_of, fingerprint_of
from pytest_cka_memory.core.decoder import (
    RepeatedKeyError,
    ShapeError,
    decode,
    shown,
    unique_keys,
)
from pytest_cka_memory.core.figures import rounded_figures
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.errors import ReportError

SCHEMA = "pytest-cka-memory-history/1"
_SCHEMAS = re.compile(r"pytest-cka-memory-history/\d{1,9}")
_CONFLICT = re.compile(r"(?:<{7}|={7}|>{7}|\|{7})(?: .*)?")


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
    prints = {
        worker: (fingerprint_of(facts), conditions_of(facts))
        for worker, facts in report.facts.items()
    }
    for result in report.results:
        if result.record.completed and result.worker in prints:
            figures = rounded_figures(result.record)
            region = HistoryRegion(result.nodeid, result.record.label, figures)
            regions.setdefault(prints[result.worker], []).append(region)
    devices = tuple(
        HistoryDevice(*on, tuple(found), dict(conditions) if conditions else None)
        for (on, conditions), found in regions.items()
    )
    return HistorySession(commit, uncommitted, report.session["started"], devices)


def read(path: Path) -> list[HistorySession]:
    """Read a history, in the order of its dates.

    Raises:
        ReportError: naming the file, the line and what is wrong with it.
    """
    try:
        if path.exists() and not path.is_file():
            raise ReportError(f"cannot use {path}: not a regular file")
        content = path.read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        sessions = list(_sessions(content))
    except ReportError as error:
        raise ReportError(f"cannot use {path}, {error}") from None
    return sorted(sessions, key=lambda session: session.date)


def _sessions(content: bytes) -> Iterator[HistorySession]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield _session(line.decode("utf-8"))
            except UnicodeDecodeError:
                raise ReportError(f"line {number}: not UTF-8; remove the line") from None
            except ReportError as error:
                raise ReportError(f"line {number}: {error}") from None


def _refuse_negative(session: HistorySession) -> None:
    for device in session.devices:
        for region in device.regions:
            for name, size in region.figures.items():
                if (size or 0) < 0:
                    raise ShapeError("a whole number of bytes, 0 or more", size).within(name)


def _session(line: str) -> HistorySession:
    if _CONFLICT.fullmatch(line.strip()):
        raise ReportError(
            f"an unresolved merge conflict ({line[:40].strip()!r}); keep the lines of both sides "
            "and remove this one"
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
        raise ReportError("no session has such values; remove the line") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        if isinstance(schema, str) and _SCHEMAS.fullmatch(schema):
            raise ReportError(
                f"schema {schema}, but this plugin reads {SCHEMA}; upgrade the plugin"
            )
        raise ReportError(
            f"{shown(data)} is not a session of a history, which has {SCHEMA!r} as its schema; "
            "name another file"
        )
    try:
        session: HistorySession = decode(HistorySession, data, "")
        _refuse_negative(session)
    except ShapeError as error:
        raise ReportError(f"{error}; remove the line") from None
    return session
