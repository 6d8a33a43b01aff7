"""GitHub Actions as a step sees it: by its environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """The step that runs the tests, and where it shows what."""

    summary: Path | None
    """What is appended here, in Markdown, stands on the job's page; None outside a job."""
    checkout: Path
    """Root of the repository: annotations name files from here."""
    root: Path
    """pytest's: test reports name files from here."""
    asked_for: bool
    """Whether an option asked; else a step that measures nothing is left alone."""

    def path_of(self, file: str) -> str | None:
        """A test report's file as annotations name it; None outside the repository."""
        path = os.path.relpath((self.root / file).resolve(), self.checkout.resolve())
        return None if path.startswith("..") else Path(path).as_posix()


def step_of(choice: str, environment: Mapping[str, str], root: Path) -> Step | None:
    """The step to report to; None where `choice` is ``no``, or ``auto`` and this is no step."""
    if choice == "no" or (choice == "auto" and environment.get("GITHUB_ACTIONS") != "true"):
        return None
    summary = environment.get("GITHUB_STEP_SUMMARY")
    return Step(
        summary=Path(summary) if summary else None,
        checkout=Path(environment.get("GITHUB_WORKSPACE") or root),
        root=root,
        asked_for=choice == "yes",
    )
