"""What a session leaves behind besides its terminal: one entry per option that asks for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pytest_cka_memory.baseline.output import BaselineOutput
from pytest_cka_memory.core.verdicts import Report
from pytest_cka_memory.integrations.github_output import GitHubOutput
from pytest_cka_memory.plugin.settings import Settings
from pytest_cka_memory.reports import files, markdown
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.reports.json import writer as json_writer


class Output(Protocol):
    """Somewhere a report goes when the tests have run."""

    @property
    def option(self) -> str:
        """What asked for it, for messages."""

    def check(self) -> None:
        """Raise ReportError, before any test has run, if it could not be written."""

    def write(self, report: Report) -> str:
        """Write `report`; returns a line that says so. Raises ReportError if it cannot."""


@dataclass(frozen=True)
class FileOutput:
    """A report as a file, whole or not at all."""

    option: str
    path: Path
    render: Callable[[Report], str]

    def check(self) -> None:
        files.check_writable(self.path)

    def write(self, report: Report) -> str:
        files.write_whole(self.path, self.render(report))
        return f"figures written to {self.path}"


_RENDERERS: Mapping[str, Callable[[Report], str]] = {
    "json": json_writer.text,
    "markdown": markdown.text,
    "html": html_page.text,
}


def outputs_of(settings: Settings) -> list[Output]:
    """Every output that `settings` ask for."""
    written = [
        FileOutput(f"--cka-memory-{name}", settings.files[name], render)
        for name, render in _RENDERERS.items()
        if name in settings.files
    ]
    step = settings.github  # last, for it tells of what the others could not write
    github = [] if step is None else [GitHubOutput(step)]
    return [*written, BaselineOutput(settings.baseline), *github]
