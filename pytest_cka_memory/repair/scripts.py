"""Run a script several times in one process, each time as ``python script.py`` does.

Changes are made to classes, so that classes and functions at the top level are made in the first
run only. What else is left at the top level is deleted, as it is when a process ends.

What a script saves by ``torch.save`` goes to a temporary folder: a run without values would write
zeros over the weights that a training has left.
"""

import ast
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_MADE_ONCE = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Script:
    """A script with its arguments.

    Args:
        path: of the file, relative to the current folder of each run: a copy of it may run there.
        arguments: as the script finds them in ``sys.argv``.

    Example:
        >>> run = Script("train.py", ["--batch", "64"])  # doctest: +SKIP
        >>> run()  # doctest: +SKIP
    """

    def __init__(self, path: str, arguments: Sequence[str] = ()) -> None:
        self._path = path
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
        with self._as_main(self._module, str(file.parent)), files_saved_elsewhere():
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
def files_saved_elsewhere() -> Iterator[None]:
    """Let ``torch.save`` write to a temporary folder in the block, and ``torch.load`` read it."""
    import torch

    from pytest_cka_memory.repair.trials import replaced

    saved: dict[str, str] = {}
    save, load = torch.save, torch.load

    with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-saved-") as folder:

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
