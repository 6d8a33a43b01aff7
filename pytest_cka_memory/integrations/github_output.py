"""The end of a session in GitHub Actions: the job's summary, and annotations in the log."""

from dataclasses import dataclass
from pathlib import Path

from pytest_cka_memory.core.verdicts import Report
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.integrations.github import Step
from pytest_cka_memory.reports import github

_MOST_BYTES = 2**20
"""GitHub drops the summary of a step that has more."""


@dataclass(frozen=True)
class GitHubOutput:
    """What a pull request shows of the session."""

    step: Step
    option: str = "--cka-memory-github"

    def check(self) -> None:
        """Leave it to :meth:`write`: a broken runner is no reason to run no test."""

    def write(self, report: Report) -> str:
        """Print annotations and append to the job's summary; nothing for nothing measured.

        Raises:
            ReportError: where an option asked for a summary that cannot be written.
        """
        if not (report.results or report.problems or self.step.asked_for):
            return ""
        # On lines of their own: the progress of the tests may not have ended its line.
        print("", *github.annotations(report, self.step.path_of), sep="\n", flush=True)
        return "" if self.step.summary is None else self._summarise(self.step.summary, report)

    def _summarise(self, path: Path, report: Report) -> str:
        text = github.job_summary(report).encode("utf-8", "backslashreplace")
        try:
            with path.open("ab") as file:
                if file.tell() + len(text) > _MOST_BYTES:
                    return f"not added to the job's summary: {path} would exceed GitHub's 1 MiB"
                file.write(text)
        except OSError as error:
            problem = f"cannot write {path}: {error.strerror or error}"
            if self.step.asked_for:
                raise ReportError(problem) from error
            return f"not added to the job's summary: {problem}"
        return "report added to the job's summary"
