"""GitHub Actions: the step that runs the tests, its job summary, and annotations in its log.

The texts of both are written by :mod:`pytest_cka_memory.reports.markdown`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.errors import ReportError

_MOST_BYTES = 2**20
"""GitHub drops the summary of a step if it is larger."""


@dataclass(frozen=True)
class JobStep:
    """The step of a GitHub Actions job that runs the tests."""

    summary: Path | None
    """The file whose Markdown GitHub shows on the job's page; None outside a job."""
    checkout: Path
    """Root of the repository: annotations name files relative to it."""
    root: Path
    """pytest's root: test reports name files relative to it."""
    asked_for: bool
    """Whether an option asked for it. If not, a session that measures nothing adds nothing."""

    def path_of(self, file: str) -> str | None:
        """Return a test report's file relative to the repository; None if it is outside it."""
        path = os.path.relpath((self.root / file).resolve(), self.checkout.resolve())
        return None if path.startswith("..") else Path(path).as_posix()


def step_of(choice: str, environment: Mapping[str, str], root: Path) -> JobStep | None:
    """Return the step to report to; None for ``no``, and for ``auto`` outside GitHub Actions."""
    if choice == "no" or (choice == "auto" and environment.get("GITHUB_ACTIONS") != "true"):
        return None
    summary = environment.get("GITHUB_STEP_SUMMARY")
    return JobStep(
        summary=Path(summary) if summary else None,
        checkout=Path(environment.get("GITHUB_WORKSPACE") or root),
        root=root,
        asked_for=choice == "yes",
    )


@dataclass(frozen=True)
class GitHubOutput:
    """What a pull request shows of the session: annotations, and the job's summary."""

    step: JobStep
    option: str = "--cka-memory-github"
    path: None = None
    """It replaces no file: it appends to the job's summary."""
    is_public = True

    def check(self) -> None:
        """Check nothing: a summary that cannot be written must not stop the tests."""

    def write(self, report: Report) -> str:
        """Print annotations and append to the job's summary; nothing if nothing was measured.

        Raises:
            ReportError: if an option asked for a summary that cannot be written.
        """
        if not (report.results or report.problems or self.step.asked_for):
            return ""
        # After the tests, because it takes a while.
        from pytest_cka_memory.reports import markdown

        # On lines of their own, because pytest's line of progress may not have ended.
        print("", *markdown.annotations(report, self.step.path_of), sep="\n", flush=True)
        return "" if self.step.summary is None else self._summarise(self.step.summary, report)

    def _summarise(self, path: Path, report: Report) -> str:
        """Append to the summary file; return a line that says whether it was written."""
        from pytest_cka_memory.reports import markdown

        summary = markdown.render(report, markdown.JOB_SUMMARY_CHARACTERS)
        text = summary.encode("utf-8", "backslashreplace")
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
