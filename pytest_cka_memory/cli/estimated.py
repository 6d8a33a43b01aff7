"""The process that ``emulated_cuda.estimate`` starts: it measures one function."""

import difflib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_cka_memory.core import sentences
from pytest_cka_memory.measure.region_stack import region_stack_for
from pytest_cka_memory.meters.selection import meter_for
from pytest_cka_memory.meters.torch_versions import is_out_of_memory


def main(arguments: Sequence[str]) -> int:
    """Measure a function, and write what it took.

    Args:
        arguments: the file to write, the function as ``FILE.py:NAME`` or ``MODULE:NAME``, how often
            it is called, and its arguments as a JSON object.
    """
    path, name, calls, keywords = arguments
    try:
        # The region is open before the function's file is run, which may allocate memory too.
        answer = _measured(name, int(calls), json.loads(keywords))
    except NoFunctionError as error:
        answer = {"error": str(error)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        answer = {"error": f"{type(error).__name__}: {error} ({where})"}
    Path(path).write_text(json.dumps(answer), encoding="utf-8")
    return 0


class NoFunctionError(Exception):
    """There is no such function."""


def _measured(name: str, calls: int, arguments: dict[str, Any]) -> dict[str, Any]:
    stack = region_stack_for(meter_for("cuda"))
    region = stack.open(thorough=True)
    ran_out = False
    try:
        function = function_of(name)
        for _ in range(calls):
            function(**arguments)
    except Exception as error:
        if not is_out_of_memory(error, stack.meter.torch_device):
            raise
        ran_out = True
    finally:
        from pytest_cka_memory.holders import groups

        holdings = groups.group_by_site(region.peaks.allocations())
        reading = region.peaks.read()
        with stack.closing(region):
            pass
    by_kind = sentences.sums_by_kind(holdings, before_region=True)
    return {
        "ran_out": ran_out,
        "peak_bytes": reading.peak_bytes,
        "reserved_bytes": reading.peak_reserved_bytes,
        "by_kind": dict(by_kind),
    }


def function_of(name: str) -> Callable[..., Any]:
    """Return a function by ``FILE.py:FUNCTION``, which runs the file, or ``MODULE:FUNCTION``.

    Raises:
        NoFunctionError: if there is none, or calling it would run nothing.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name:
        raise NoFunctionError(f"{name!r}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise NoFunctionError(f"there is no file {module_name!r}")
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None, "a Python file"  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            if "no known parent package" not in str(error):
                raise
            raise NoFunctionError(_imported_as(path.resolve(), function_name)) from None
    else:
        sys.path.insert(0, str(Path.cwd()))
        if not _is_module(module_name):
            raise NoFunctionError(f"there is no module {module_name!r}")
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NoFunctionError(_is_missing(module, module_name, function_name))
    for kind, is_kind in _NOT_RUN.items():
        if is_kind(function):
            raise NoFunctionError(
                f"{name} is {kind}, so a call runs nothing of it; write a function that runs it"
            )
    imported: Callable[..., Any] = function
    return imported


_NOT_RUN = {
    "an async function": inspect.iscoroutinefunction,
    "a generator": inspect.isgeneratorfunction,
    "an async generator": inspect.isasyncgenfunction,
}
_MOST_NAMES = 5


def _imported_as(path: Path, function_name: str) -> str:
    """Return a sentence about a file with relative imports: how it is named as a module."""
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) == 1:  # a package without such a file
        parts.insert(0, folder.name)
        folder = folder.parent
    return (
        f"{path.name} imports relatively, so it is a module of a package: write "
        f"'{'.'.join(parts)}:{function_name}', in the folder {folder}"
    )


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # The package is missing, or is a module; another one is missed by the package's own code.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False


def _is_missing(module: ModuleType, module_name: str, function_name: str) -> str:
    """Return a sentence about a name that no function of a module has."""
    problem = f"{module_name} has no function {function_name!r}"
    owner, _, method = function_name.partition(".")
    if method and hasattr(module, owner):
        return f"{problem}; write a function at the top of the file that calls it"
    names = [name for name, it in vars(module).items() if _is_step(it, module)]
    if not names:
        return problem
    near = difflib.get_close_matches(function_name, names, n=1)
    others = "..." if len(names) > _MOST_NAMES else ""
    some = ", ".join(near or [*names[:_MOST_NAMES], *filter(None, [others])])
    return f"{problem}, but {some}"


def _is_step(it: object, module: ModuleType) -> bool:
    return inspect.isfunction(it) and it.__module__ == module.__name__


if __name__ == "__main__":
    job_of_this_process = sys.argv[1:]
    del sys.argv[1:]  # the function's file may read them as its own
    sys.exit(main(job_of_this_process))
