"""What runs in the processes that measure a function which is given by its name.

``emulated_cuda.estimate`` starts one, and :mod:`pytest_cka_memory.measure.law_processes` the other.
What imports torch is imported after the device is loaded, which cannot be loaded later.
"""

import builtins
import difflib
import importlib
import importlib.util
import inspect
import json
import pickle
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest_cka_memory
from pytest_cka_memory.core import places, sentences
from pytest_cka_memory.errors import CkaMemoryError, RegionError
from pytest_cka_memory.measure.law_processes import IF_ON_CPU
from pytest_cka_memory.meters.selection import meter_for

_IMPORTS = ("<frozen importlib", importlib.__file__)
_OWN_FILES = (f"{Path(pytest_cka_memory.__file__).parent}/", *_IMPORTS)
_STALE = "StaleValueError"
_REMEDY = (
    "; the step needs values: pass device='emulate:cuda' or device='emulate:cuda:h100', which "
    "compute values"
)


def estimate(arguments: Sequence[str]) -> int:
    """Measure a function for ``emulated_cuda.estimate``, and write what it took.

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
    from pytest_cka_memory.holders import groups
    from pytest_cka_memory.measure.region_stack import region_stack_for
    from pytest_cka_memory.meters.torch_versions import is_out_of_memory

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
        raise NoFunctionError(
            f"{name!r} does not name a function; write FILE.py:FUNCTION or MODULE:FUNCTION"
        )
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
                f"{name} is {kind}, so a call does not run its code; write a function that runs it"
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
        f"{path.name} has relative imports, so it is a module of a package: write "
        f"'{'.'.join(parts)}:{function_name}', and run this in the folder {folder}"
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
    names = [
        name
        for name, it in vars(module).items()
        if inspect.isfunction(it) and it.__module__ == module.__name__
    ]
    if not names:
        return problem
    near = difflib.get_close_matches(function_name, names, n=1)
    others = "..." if len(names) > _MOST_NAMES else ""
    some = ", ".join(near or [*names[:_MOST_NAMES], *filter(None, [others])])
    return f"{problem}, but {some}"


def do_job_of_law(arguments: Sequence[str]) -> int:
    """Do one job of :mod:`pytest_cka_memory.measure.law_processes`, and write what came of it.

    That is the kind of the answer, the answer, and a traceback.

    Args:
        arguments: the file with the job, that to write, and the device.
    """
    source, path, device = arguments
    answer: tuple[str, Any, str]
    job: dict[str, Any] = {}
    try:
        meter_for(device)  # before the job is read, which may refer to torch
        job = pickle.loads(Path(source).read_bytes())
        with places.root(job["root"]) if job["root"] else nullcontext():
            answer = ("found", _done(job, device), "")
    except SystemExit as error:
        answer = ("error", RegionError(_exited(error, job.get("step", ""))), "")
    except (Exception, KeyboardInterrupt) as error:
        answer = ("error", _passed_on(error, job.get("step", "")), _traceback_of(error))
    Path(path).write_bytes(pickle.dumps(answer))
    return 0


def _done(job: Mapping[str, Any], device: str) -> Any:
    from pytest_cka_memory.measure.law_runs import LimitedRuns, Runner, find_law, split_sizes
    from pytest_cka_memory.measure.region_stack import region_stack_for

    stack = region_stack_for(meter_for(device))
    # It is open before the step's file is run, which may allocate memory too.
    region = stack.open()
    try:
        step = function_of(job["step"])
        varied, fixed = split_sizes(job["sizes"])
        if job["wanted"] == "law":
            law = find_law(stack, step, job["law_of"], job["sizes"])
            answer: Any = law.as_arguments()
        else:
            runner = Runner(stack, step, tuple(varied), fixed, job["law_of"])
            least = tuple(min(values) for values in varied.values())
            runner.warm_up(least)
            if job["wanted"] == "sample":
                answer = runner.sample(job["point"])
            else:
                limited = LimitedRuns(stack, runner, least)
                law = pytest_cka_memory.Law(**job["found"], limited=limited)
                answer = law.largest(job["name"], verify=job["verify"], **job["given"])
    except NoFunctionError as error:
        raise RegionError(f"law(): {error}") from None
    finally:
        with stack.closing(region) as closed:
            pass
    if not closed.end.peak_bytes:
        raise RegionError(
            f"law(): {job['step']} does not use {device}: nothing was allocated there. Move the "
            f"model and the data to 'cuda'; {IF_ON_CPU}"
        )
    return answer


def _exited(error: SystemExit, step: str) -> str:
    library = f"{sysconfig.get_path('stdlib')}/"  # such as argparse, which the step's file calls
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((library, *_OWN_FILES))
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        f"law(): {step} ended the process with status {error.code!r}{where}; a step must return. "
        "Put code that runs the program under if __name__ == '__main__':"
    )


def _passed_on(error: BaseException, step: str) -> BaseException:
    """Return an exception that the other process can raise.

    That of another class may need modules that the other process has not imported.
    """
    kind, text = type(error), f"{type(error).__name__}: {error}"
    if kind.__name__ == _STALE:
        return RegionError(f"law(): {step} raised {text}{_REMEDY}")
    if isinstance(error, KeyboardInterrupt):  # by the step itself: this one is not for pytest
        return RegionError(f"law(): {step} raised {kind.__name__}")
    known = isinstance(error, CkaMemoryError) or getattr(builtins, kind.__name__, None) is kind
    if known and _is_passed(error):
        return error
    return RegionError(f"law(): {step} raised {text}")


def _is_passed(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _traceback_of(error: BaseException) -> str:
    """Return the traceback from the step on; empty if the step has not raised the error."""
    if isinstance(error, CkaMemoryError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(_OWN_FILES):
        del frames[0]
    if not frames:
        return ""
    lines = traceback.format_list(frames)
    return "".join(["Traceback of the step's process:\n", *lines]) + (
        "".join(traceback.format_exception_only(error))
    )


_JOBS = {"estimate": estimate, "law": do_job_of_law}


if __name__ == "__main__":
    job_of_this_process = sys.argv[1:]
    del sys.argv[1:]  # the function's file may read them as its own
    sys.exit(_JOBS[job_of_this_process[0]](job_of_this_process[1:]))
