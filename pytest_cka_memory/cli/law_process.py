"""The process that :mod:`pytest_cka_memory.measure.law_processes` starts: it runs a named step."""

import builtins
import importlib
import pickle
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest_cka_memory
from pytest_cka_memory.core import places
from pytest_cka_memory.errors import CkaMemoryError, RegionError
from pytest_cka_memory.measure.law_processes import IF_ON_CPU
from pytest_cka_memory.meters.selection import meter_for

_IMPORTS = ("<frozen importlib", importlib.__file__)
_OWN_FILES = (f"{Path(pytest_cka_memory.__file__).parent}/", *_IMPORTS)
_STALE = "StaleValueError"
_REMEDY = (
    "; the step needs values: pass device='emulate:cuda', or emulate:cuda:h100, which computes them"
)


def main(arguments: Sequence[str]) -> int:
    """Do one job, and write the kind of the answer, the answer, and a traceback.

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
    from pytest_cka_memory.cli.estimated import NoFunctionError, function_of
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
        f"law(): {step} ended the process with status {error.code!r}{where}; a step has to return, "
        "and what runs a program has to be under if __name__ == '__main__':"
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


if __name__ == "__main__":
    job_of_this_process = sys.argv[1:]
    del sys.argv[1:]  # the step's file may read them as its own
    sys.exit(main(job_of_this_process))
