"""A copy of a program's folder in which some files have another text."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_COPIED = {".py", ".toml", ".ini", ".cfg", ".json", ".yaml", ".yml", ".txt"}
_SKIPPED = {".git", "node_modules", "__pycache__", "site-packages", ".venv", "venv", "build"}
_MOST_BYTES = 2**20
_MOST_FILES = 5_000


def patched_copy(root: Path, made: Path, files: Mapping[str, str]) -> Path:
    """Make a folder in which the program of `root` runs with other texts of some files.

    Small text files are copied, because Python and pytest resolve the links of what they import.
    Everything else is linked, such as data: the copy reads what the program reads.

    Args:
        root: the folder of the program.
        made: an existing, empty folder.
        files: path of a file below `root` -> its text in the copy.

    Returns:
        `made`.

    Example:
        >>> patched_copy(Path.cwd(), made, {"/home/you/train.py": "..."})  # doctest: +SKIP
    """
    copied = 0
    folders = _folders_of_code(root)
    for folder in sorted(folders):
        target = made / folder.relative_to(root)
        target.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(folder):
            path = Path(entry.path)
            if entry.name in _SKIPPED or path in folders:
                continue
            is_text = entry.is_file() and path.suffix in _COPIED
            if is_text and entry.stat().st_size <= _MOST_BYTES and copied < _MOST_FILES:
                shutil.copyfile(path, target / entry.name)
                copied += 1
            else:
                _link(path, target / entry.name)
    for file, text in files.items():
        target = made / Path(file).relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return made


def _folders_of_code(root: Path) -> set[Path]:
    """Return `root`, and the folders below it with Python files in them or further below."""
    found = {root}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED]
        path = Path(folder)
        while path not in found and any(file.endswith(".py") for file in files):
            found.add(path)
            path = path.parent
    return found


def _link(path: Path, target: Path) -> None:
    with suppress(OSError):  # Windows may not allow it; then the program does without
        target.symlink_to(path, target_is_directory=path.is_dir())
