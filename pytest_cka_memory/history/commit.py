"""Which commit of a git repository is checked out."""

import os
import subprocess
from pathlib import Path

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
