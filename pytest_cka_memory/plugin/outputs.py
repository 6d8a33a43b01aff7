"""What a session writes besides its terminal output: one output per option."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Protocol

from pytest_cka_memory.baseline.output import BaselineOutput
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.integrations.github import GitHubOutput
from pytest_cka_memory.plugin.settings import Settings
from pytest_cka_memory.reports import files


class Output(Protocol):
    """Something that is written from the report after the tests have run."""

    @property
    def option(self) -> str:
        """The option that asks for it, for messages."""

    @property
    def path(self) -> Path | None:
        """The file that it replaces; None if it replaces none."""

    @property
    def is_public(self) -> bool:
        """Whether others read it, so that it must name no user, host or folder of this machine."""

    def check(self) -> None:
        """Raise ReportError if it cannot be written; called before any test has run."""

    def write(self, report: Report) -> str:
        """Write `report` and return a line that says so; raise ReportError if it fails."""


@dataclass(frozen=True)
class FileOutput:
    """A report file; an error while writing leaves an old file as it was."""

    option: str
    path: Path
    renderer: str
    """The module that renders it; imported when it is written."""
    is_public = True

    def check(self) -> None:
        files.check_writable(self.path)

    def write(self, report: Report) -> str:
        files.write_whole(self.path, import_module(self.renderer).render(report))
        return f"figures written to {self.path}"


_RENDERERS: Mapping[str, str] = {
    "json": "pytest_cka_memory.reports.json.writer",
    "markdown": "pytest_cka_memory.reports.markdown",
    "html": "pytest_cka_memory.reports.html.page",
}


def outputs_of(settings: Settings) -> list[Output]:
    """Return every output that `settings` ask for."""
    reports = [
        FileOutput(f"--cka-memory-{name}", settings.files[name], renderer)
        for name, renderer in _RENDERERS.items()
        if name in settings.files
    ]
    path = settings.history
    history: list[Output] = []
    if path is not None:
        from pytest_cka_memory.history.output import HistoryOutput

        history.append(HistoryOutput(path, settings.root))
    step = settings.github
    github = [] if step is None else [GitHubOutput(step)]
    # GitHub is last, because its annotations name the outputs that could not be written.
    return [*reports, BaselineOutput(settings.baseline), *history, *github]


def check(outputs: Sequence[Output], given_by: Callable[[str], str] = str) -> None:
    """Check all outputs before any test has run.

    Args:
        outputs: what the session will write.
        given_by: returns the ini key instead of an option if the path comes from there.

    Raises:
        ReportError: if one cannot be written, or two would write the same file; names the option.
    """
    for output in outputs:
        try:
            output.check()
        except ReportError as error:
            raise ReportError(f"{given_by(output.option)}: {error}") from None
    for first, second in combinations(outputs, 2):
        if first.path and second.path and files.same_file(first.path, second.path):
            raise ReportError(
                f"{given_by(first.option)} and {given_by(second.option)}: both name the file "
                f"{first.path}, so one would overwrite the other; give each a path of its own"
            )
