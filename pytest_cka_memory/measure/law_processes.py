"""Laws of steps that are given by name: they run in a process of their own, on an emulated card.

A card cannot be emulated in a process in which torch has looked for devices, such as a notebook or
a session on the CPU. Each operation (finding a law, one more run, the search of the largest size)
starts a process, which runs the step at its smallest sizes first. What it found comes back as
builtin types and samples; the law that users get is put together here.
"""

import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from emulated_cuda.cards import DEFAULT_CARD
from pytest_cka_memory.core import places
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.laws import Sample
from pytest_cka_memory.laws.answers import Largest
from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.laws.polynomials import Point
from pytest_cka_memory.meters import EMULATED, is_emulated, parse_emulated

_MEASURES = "pytest_cka_memory.cli.named_functions"
"""The module that runs in the other process."""
MARK = "CKA_MEMORY_LAW_PROCESS"
"""A variable of that process: it starts no further one, whatever the step's file does."""
IF_ON_CPU = "to run the step on the CPU, pass device='cpu'"
_EMULATION = "EMULATED_CUDA"
_LAST = 2000
"""Characters of the other process's output that an error shows."""


class Target(NamedTuple):
    """A step by name, and where it is run."""

    name: str
    """``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""
    device: str
    """As ``--cka-memory-device`` takes it."""

    @property
    def where(self) -> str:
        """The device in words, for the text of a law."""
        if not is_emulated(self.device):
            return f"{self.device}, in a process of its own"
        wanted = parse_emulated(self.device)
        values = "without values" if wanted.values is False else "with values"
        return f"an emulated {wanted.card} {values}, in a process of its own"


class ProcessTracebackError(Exception):
    """The cause of an error that was raised in another process: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def target_of(
    step: Callable[..., Any] | str, card: str | None, device: str | None
) -> Target | None:
    """Return where a step runs in a process of its own; None if it runs here.

    Args:
        step: its name; or a function, which runs here unless `device` is an emulated one.
        card: the name of an emulated card, without values.
        device: any device instead.

    Raises:
        DeviceError: if there is no such card.
        ValueError: if the name is none, both a card and a device are given, or a function cannot
            be found by another process.
    """
    if isinstance(step, str):
        if not all(step.rpartition(":")):
            raise ValueError(
                f"law({step!r}) does not name a function; write 'FILE.py:FUNCTION' or "
                "'MODULE:FUNCTION'"
            )
        if card is not None and device is not None:
            raise ValueError(
                f"law(card={card!r}, device={device!r}) names two devices; write only one of the "
                "two"
            )
        device_name = device or f"{EMULATED}:{card or DEFAULT_CARD},values=off"
        name = step
    elif device is not None and str(device).startswith(EMULATED):
        device_name, name = str(device), _name_of(step)
    else:
        return None
    if is_emulated(device_name):
        parse_emulated(device_name)
    if MARK in os.environ:
        raise RegionError(
            f"law({name!r}) was called again by the process that it had started, while that "
            "process imported the file of the step; put the call under if __name__ == '__main__':"
        )
    return Target(name, device_name)


def label_of(step: Callable[..., Any] | str) -> str:
    """Return the name of a step for the label of its region, the same on each machine."""
    if isinstance(step, str):
        return Path(step).name
    return getattr(step, "__name__", type(step).__name__)


def _name_of(step: Callable[..., Any]) -> str:
    """Return the name by which another process finds a function.

    Raises:
        ValueError: if it finds none.
    """
    name, module = getattr(step, "__name__", ""), getattr(step, "__module__", "")
    of_module = sys.modules.get(module)
    if not (
        inspect.isfunction(step)
        and module != "__main__"
        and step.__closure__ is None
        and getattr(of_module, name, None) is step
    ):
        raise ValueError(
            f"law(): another process cannot import {getattr(step, '__qualname__', step)!s}; "
            "define it as a function at the top level of a file and pass its name, e.g. "
            "'train.py:step'"
        )
    file = getattr(of_module, "__file__", None)
    if "." not in module and file is not None and file.endswith(".py"):
        return f"{file}:{name}"  # a test module need not be on Python's path
    if find_spec(module) is None:
        raise ValueError(
            f"law(): another process cannot import the module {module!r}, which defines the step; "
            "pass the step as 'FILE.py:FUNCTION'"
        )
    return f"{module}:{name}"


def find_law(target: Target, law_of: str, sizes: Mapping[str, Any]) -> Law:
    """Do what :meth:`~pytest_cka_memory.MemoryProbe.law` says, in a process of its own.

    Raises:
        DeviceError: if the device is not available.
        RegionError: if there is no such step, it runs out of memory or does not use the card, or
            raises an exception that is not one of Python's own.
        TypeError: if an argument cannot be passed to another process.
    """
    job = {"law_of": law_of, "sizes": dict(sizes), "root": places.current_root()}
    return _LawOfProcess(target, job, _answer(target, "law", job))


def _is_nothing(law: Law) -> bool:
    """Whether the law is of a peak and its step has allocated nothing in any run."""
    of_peak = law.figure in ("peak", "allocated")
    return of_peak and not any(sample.value for sample in law.fitted.samples)


class _LawOfProcess(Law):
    """A law whose step runs in a process of its own, also for further runs."""

    def __init__(
        self, target: Target, job: Mapping[str, Any], arguments_of_law: Mapping[str, Any]
    ) -> None:
        super().__init__(**arguments_of_law, device=target.where, measure=self._sample)
        self.elsewhere = target.device
        self._allocates_nothing = _is_nothing(self)
        self._target, self._job, self._found = target, job, arguments_of_law

    def __str__(self) -> str:
        text = super().__str__()
        if not self._allocates_nothing:
            return text
        return f"{text}\nnote: the step allocates nothing on {self.elsewhere}; {IF_ON_CPU}"

    def _sample(self, point: Point) -> Sample:
        sample: Sample = _answer(self._target, "sample", {**self._job, "point": point})
        return sample

    def largest(
        self,
        name: str,
        *,
        card: str | None = None,
        memory: object = None,
        verify: bool | None = None,
        **sizes: int,
    ) -> Largest:
        requested = {"card": card, "memory": memory, **sizes}
        # Without a run, it checks the arguments and says what the law alone says.
        by_law = super().largest(name, verify=False, **requested)  # type: ignore[arg-type]
        if verify is False:
            return by_law
        job = {
            **self._job,
            "found": self._found,
            "name": name,
            "given": requested,
            "verify": verify,
        }
        largest: Largest = _answer(self._target, "largest", job)
        return largest


def _answer(target: Target, wanted: str, job: Mapping[str, Any]) -> Any:
    """Return what a process has found that does what is wanted.

    Raises:
        TypeError: if an argument cannot be passed to it.
    """
    with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-law-") as folder:
        source, path = Path(folder, "job"), Path(folder, "answer")
        try:
            source.write_bytes(pickle.dumps({**job, "step": target.name, "wanted": wanted}))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"law(): {error}; pass values that can be pickled, because the step runs in "
                "another process"
            ) from None
        run = subprocess.run(
            [sys.executable, "-m", _MEASURES, "law", str(source), str(path), target.device],
            env=_environment(target),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not path.exists():
            raise RegionError(f"law(): the process that ran {target.name!r} {_how_it_ended(run)}")
        # Of a process that this one has started, and that ran the user's code anyway.
        kind, answer, text = pickle.loads(path.read_bytes())
    if kind == "error":
        raise answer from (ProcessTracebackError(text) if text else None)
    return answer


def _how_it_ended(run: "subprocess.CompletedProcess[str]") -> str:
    how = f"has ended with status {run.returncode}"
    if run.returncode < 0:
        with suppress(ValueError):  # a signal without a name
            how = f"was ended by {signal.Signals(-run.returncode).name}"
    output = (run.stderr or run.stdout).strip()[-_LAST:]
    return f"{how}: {output}" if output else f"{how} and said nothing"


def _environment(target: Target) -> dict[str, str]:
    environment = {**os.environ, MARK: "1"}
    if is_emulated(target.device):
        # What this process emulates, and which GPU it uses, is not for the other one.
        environment.pop(_EMULATION, None)
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    paths = [environment.get("PYTHONPATH", ""), *(path for path in sys.path if path)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    return environment
