"""Loads the library that takes the place of the CUDA runtime, in this process and its children.

This module itself says how Python processes that this one starts have the device too. Two
environment variables do it: one holds the arguments of
:func:`emulated_cuda.loading.loaded.load`, and PYTHONPATH begins with a folder whose
``sitecustomize`` calls :func:`load_before_torch`. PATH begins with a folder that has ``nvidia-smi``
(:mod:`emulated_cuda.smi`). So ``subprocess``, ``torchrun`` and ``multiprocessing`` with any start
method work alike. A process that is started with another environment, or with one of Python's
options ``-I``, ``-E`` and ``-S``, does not have the device.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

from emulated_cuda import this_process
from emulated_cuda.errors import DeviceError

VARIABLE = "EMULATED_CUDA"
"""The arguments of ``load`` as JSON, and what :data:`_OTHERS` names."""
_OTHERS = ("records", "machine", "snapshot")
"""What else it has: a folder for :mod:`.records`, a name for the processes that share cards, and
where :func:`.loaded.record_until_exit` writes torch's recording."""
PYTHON_VARIABLE = "EMULATED_CUDA_PYTHON"
"""The interpreter that runs ``nvidia-smi``: a program may be started with another one on PATH."""
_SITE = str(Path(__file__).parents[1] / "site")
NUMBA_VARIABLE = "NUMBA_DISABLE_CUDA"
PROGRAMS = str(Path(_SITE, "programs"))
"""A folder of programs that a driver installs."""


def load_in_children(
    card: str, devices: int, total_bytes: int, values: bool | None, late_events: bool
) -> None:
    """Have processes that are started from now on load this device."""
    arguments: dict[str, Any] = {"card": card, "devices": devices, "total_bytes": total_bytes}
    arguments.update(values=values, late_events=late_events)
    os.environ.update(environment_with(dict(os.environ), **arguments))
    # Some code makes PYTHONPATH of a child from `sys.path`: Inductor for its compile workers.
    if _SITE not in sys.path:
        sys.path.insert(1, _SITE)


def environment_with(environment: dict[str, str], **setting: Any) -> dict[str, str]:
    """Return an environment in which a process has a device.

    Args:
        environment: the variables of a process.
        setting: arguments of ``load``. Those that `environment` already has are kept if they are
            not among these.
    """
    merged = {"machine": secrets.token_hex(8), **setting_of(environment), **setting}
    return {
        **environment,
        VARIABLE: json.dumps(merged),
        PYTHON_VARIABLE: sys.executable,
        "PYTHONPATH": _with_first(_SITE, environment.get("PYTHONPATH")),
        "PATH": _with_first(PROGRAMS, environment.get("PATH", os.defpath)),
        # Kernels of Numba are not computed. Programs that ask Numba for CUDA have a way without it.
        # Numba reads this when it is imported, which may be before the device is loaded.
        NUMBA_VARIABLE: environment.get(NUMBA_VARIABLE, "1"),
    }


def _with_first(first: str, paths: str | None) -> str:
    others = [path for path in paths.split(os.pathsep) if path != first] if paths else []
    return os.pathsep.join([first, *others])


def arguments_of(environment: Any) -> dict[str, Any]:
    """Return the arguments of ``load`` that an environment holds; empty if it has no device.

    Raises:
        DeviceError: if it holds something else.
    """
    setting = setting_of(environment)
    return {name: value for name, value in setting.items() if name not in _OTHERS}


def setting_of(environment: Any) -> dict[str, Any]:
    """Return what an environment holds; empty if it has no device.

    Raises:
        DeviceError: if it holds something else.
    """
    text = environment.get(VARIABLE) or "{}"
    with suppress(ValueError):
        setting = json.loads(text)
        if isinstance(setting, dict):
            return setting
    raise DeviceError(
        f"cannot use the environment variable {VARIABLE}={text!r}, because emulated_cuda did not "
        "write it; unset it, then run python -m emulated_cuda or call emulated_cuda.load()"
    )


_PACKAGES = ("torch", "cuda.bindings", "cupy_backends", "numba_cuda")
"""Packages that look for a driver: whichever a program imports first."""
_LIBRARIES = ("libnvidia-ml.so",)
"""How the names of libraries begin that programs load by ctypes, with and without torch: pynvml."""


def load_before_torch(load: Callable[[], None]) -> None:
    """Load the device if the environment names one, before this process looks for a device.

    Args:
        load: loads it, with :func:`arguments_of` this environment; called when a package that looks
            for a driver is imported, or a library of the driver is loaded.
    """
    if VARIABLE in os.environ:
        for module in _PACKAGES:
            this_process.call_before(module, load)
        this_process.call_after("ctypes", partial(_load_before_libraries, load))


def _load_before_libraries(load: Callable[[], None]) -> None:
    import ctypes  # most processes do not

    load_library = ctypes.CDLL.__init__

    @wraps(load_library)
    def load_device_first(self: Any, name: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(name, str) and name.startswith(_LIBRARIES):
            load()
        load_library(self, name, *args, **kwargs)

    ctypes.CDLL.__init__ = load_device_first  # type: ignore[method-assign]
