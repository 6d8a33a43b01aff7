"""The programs of other people that cases run as they are: from copies of their repositories.

Nothing of these programs is in this repository. A folder has copies of the repositories as git has
them: ``OWNER+NAME`` with the git directory in it, or ``OWNER+NAME.git``. The published figures and
their addresses are in ``cases/``.
"""

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path


def git_directory(folder: Path, repository: str) -> Path:
    """Return the git directory of a repository below a folder.

    Args:
        folder: of repositories.
        repository: its owner and name, with ``/`` between them.

    Raises:
        SystemExit: if there is none.
    """
    name = repository.replace("/", "+")
    places = [folder / f"{name}.git", *sorted((folder / name).glob("*")), folder / name]
    for place in places:
        if (place / "objects").is_dir():
            return place
    raise SystemExit(f"{folder} has no git directory of {repository}: expected {name}.git")


def extract(git: Path, commit: str, parts: Sequence[str], into: Path) -> None:
    """Write files and folders of a commit into a folder.

    Args:
        git: the git directory.
        commit: its name.
        parts: which of its files and folders.
        into: the folder.
    """
    command = ["git", f"--git-dir={git}", "archive", commit, *parts]
    packed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")
