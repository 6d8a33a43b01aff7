"""What ``emulated_cuda.estimate`` runs in a process of its own: one function, measured."""

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytest_cka_memory.core import kinds
from pytest_cka_memory.measure.region_stack import region_stack_for
from pytest_cka_memory.meters.selection import meter_for
from pytest_cka_memory.meters.torch_versions import is_out_of_memory


def main(arguments: Sequence[str]) -> int:
    """Measure a function, and write what it took.

    Args:
        arguments: the file to write, the function as ``FILE.py:NAME`` or ``MODULE:NAME``, how often
            it is called, and its arguments as a JSON object.
    """
    path, name, calls, given = arguments
    try:
        # The region is open before the function's file is run, which may allocate memory too.
        found = _measured(name, int(calls), json.loads(given))
    except NoFunctionError as error:
        found = {"error": str(error)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        found = {"error": f"{type(error).__name__}: {error} ({where})"}
    Path(path).write_text(json.dumps(found), encoding="utf-8")
    return 0


class NoFunctionError(Exception):
    """There is no such function."""


def _measured(name: str, calls: int, given: dict[str, Any]) -> dict[str, Any]:
    stack = region_stack_for(meter_for("cuda"))
    region = stack.open(thorough=True)
    ran_out = False
    try:
        function = function_of(name)
        for _ in range(calls):
            function(**given)
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
    by_kind = kinds.sums(holdings, before_region=True)
    return {
        "ran_out": ran_out,
        "peak_bytes": reading.peak_bytes,
        "reserved_bytes": reading.peak_reserved_bytes,
        "by_kind": dict(by_kind),
    }


def function_of(name: str) -> Callable[..., Any]:
    """Return a function by ``FILE.py:FUNCTION``, which runs the file, or ``MODULE:FUNCTION``.

    Raises:
        NoFunctionError: if there is none.
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
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        if importlib.util.find_spec(module_name) is None:
            raise NoFunctionError(f"there is no module {module_name!r}")
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NoFunctionError(f"{module_name} has no function {function_name!r}")
    found: Callable[..., Any] = function
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
