"""A user's program: a script that runs several times in one process, and a patched copy of it.

Each run is as by ``python script.py``. Changes are made to classes, so that classes and functions
at the top level are made in the first run only. What else is left at the top level is deleted, as
it is when a process ends.

What a script saves by ``torch.save`` goes to a temporary folder: a run without values would write
zeros over the weights that a training has left.
"""

import ast
import difflib
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_cka_memory.errors import ReportError

_MADE_ONCE = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Script:
    """A script with its arguments.

    Args:
        path: of the file, relative to the current folder of each run: a copy of it may run there.
        arguments: as the script finds them in ``sys.argv``.
        temporary: the folder for what it saves; the system's own for temporary files if None.

    Example:
        >>> run = Script("train.py", ["--batch", "64"])  # doctest: +SKIP
        >>> run()  # doctest: +SKIP
    """

    def __init__(
        self, path: str, arguments: Sequence[str] = (), temporary: str | None = None
    ) -> None:
        self._path = path
        self._temporary = temporary
        self._arguments = list(arguments)
        self._module: ModuleType | None = None

    def __call__(self) -> None:
        """Run it once.

        Raises:
            SystemExit: if the script ends with an exit status that is not 0.
        """
        file = Path(self._path).resolve()
        tree = ast.parse(file.read_bytes(), str(file))
        made_once = {each.name for each in tree.body if isinstance(each, _MADE_ONCE)}
        if self._module is None:
            self._module = ModuleType("__main__")
            self._module.__file__ = str(file)
        else:
            tree.body = [each for each in tree.body if not isinstance(each, _MADE_ONCE)]
        names = vars(self._module)
        with self._as_main(self._module, str(file.parent)), files_saved_elsewhere(self._temporary):
            try:
                exec(compile(tree, str(file), "exec", dont_inherit=True), names)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
            finally:
                for name in [each for each in names if not each.startswith("__")]:
                    if name not in made_once:
                        del names[name]

    @contextmanager
    def _as_main(self, module: ModuleType, folder: str) -> Iterator[None]:
        main, arguments, path = sys.modules["__main__"], sys.argv, sys.path[:]
        sys.modules["__main__"], sys.argv = module, [self._path, *self._arguments]
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.modules["__main__"], sys.argv, sys.path[:] = main, arguments, path


@contextmanager
def files_saved_elsewhere(temporary: str | None = None) -> Iterator[None]:
    """Let ``torch.save`` write to a temporary folder in the block, and ``torch.load`` read it.

    Args:
        temporary: in which that folder is made; None for the system's own for temporary files.
    """
    import torch

    from pytest_cka_memory.repair.trials import replaced

    saved: dict[str, str] = {}
    save, load = torch.save, torch.load

    with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-saved-", dir=temporary) as folder:

        @functools.wraps(save)
        def save_elsewhere(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                path = str(Path(f).absolute())
                f = saved.setdefault(path, str(Path(folder, str(len(saved)))))
            save(obj, f, *args, **kwargs)

        @functools.wraps(load)
        def load_from_there(f: Any, *args: Any, **kwargs: Any) -> Any:
            is_path = isinstance(f, (str, os.PathLike))
            found = saved.get(str(Path(f).absolute()), f) if is_path else f
            return load(found, *args, **kwargs)

        with (
            replaced(torch, "save", save_elsewhere),
            replaced(torch, "load", load_from_there),
        ):
            yield


def split_script(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments before the first that is a script: what follows it belongs to the script."""
    for number, argument in enumerate(arguments):
        if is_script(argument):
            return list(arguments[:number]), list(arguments[number:])
    return list(arguments), []


def is_script(path: str) -> bool:
    """Whether a path is that of a Python file that pytest finds no test in.

    A script may have a function ``test``, which an ``if __name__ == "__main__"`` calls.
    """
    file = Path(path)
    if file.suffix != ".py" or not file.is_file() or file.name.startswith("test_"):
        return False
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return False
    if any(isinstance(each, ast.If) and "__main__" in ast.unparse(each.test) for each in tree.body):
        return True
    named = (each for each in tree.body if isinstance(each, _MADE_ONCE))
    return not any(each.name.startswith(("test", "Test")) for each in named)


_NAMED_FILE = re.compile(r"(.+?\.py)(?:(::?)(.+))?")


def check_named_files(arguments: Sequence[str]) -> None:
    """Check that files exist that arguments of pytest name, and that functions are named as tests.

    pytest would complain of what follows instead: options of a script whose name is misspelt.

    Raises:
        ReportError: if a file does not exist, or an argument is ``FILE.py:FUNCTION``.
    """
    for before, argument in zip(("", *arguments), arguments, strict=False):
        found = _NAMED_FILE.fullmatch(argument)
        is_of_option = before.startswith("-") and "=" not in before
        if found is None or is_of_option or argument.startswith("-"):
            continue
        file, colons, name = found.groups()
        if not Path(file).is_file():
            raise ReportError(f"repair: there is no file {file!r}{_but_near(Path(file))}")
        if colons == ":":
            raise ReportError(
                f"repair: {argument!r} is neither a script nor a test; write a script with its "
                f"arguments, such as {file} --batch 64, or a test with two colons, such as "
                f"{file}::{name}"
            )


def _but_near(path: Path) -> str:
    """Return words about the file in the same folder whose name is nearest; empty without one."""
    names = [each.name for each in path.parent.glob("*.py")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f", but there is {str(path.with_name(near[0]))!r}" if near else ""


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
