"""What a session writes besides its terminal output: one output per option."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.plugin.session.settings import Settings

if TYPE_CHECKING:
    from pytest_cka_memory.core.report import Report


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

    def write(self, report: "Report") -> str:
        """Write `report` and return a line that says so; raise ReportError if it fails."""


class FileOutput(NamedTuple):
    """A report file; an error while writing leaves an old file as it was."""

    option: str
    path: Path
    renderer: str
    """The module that renders it; imported when it is written."""
    is_public: bool = True

    def check(self) -> None:
        from pytest_cka_memory.reports import files

        files.check_writable(self.path)

    def write(self, report: "Report") -> str:
        from pytest_cka_memory.reports import files

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
    others: list[Output] = []
    baseline = settings.baseline
    # A report may be given the path at which later sessions look for baselines.
    if baseline.asked_for or reports or baseline.path.exists():
        from pytest_cka_memory.baseline.output import BaselineOutput

        others.append(BaselineOutput(baseline))
    if settings.history is not None:
        from pytest_cka_memory.history.output import HistoryOutput

        others.append(HistoryOutput(settings.history, settings.root))
    if settings.github is not None:
        from pytest_cka_memory.integrations.github import GitHubOutput

        # The last, because its annotations name the outputs that could not be written.
        others.append(GitHubOutput(settings.github))
    return [*reports, *others]


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
    if len(outputs) < 2:
        return
    from pytest_cka_memory.reports import files

    for first, second in combinations(outputs, 2):
        if first.path and second.path and files.same_file(first.path, second.path):
            raise ReportError(
                f"{given_by(first.option)} and {given_by(second.option)}: both name the file "
                f"{first.path}, so one would overwrite the other; give each a path of its own"
            )
