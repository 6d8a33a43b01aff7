"""Whether a device can be emulated on this machine, with this torch, in this process.

Nothing here imports torch: the library has to be loaded first.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from emulated_cuda.cards import CONTEXT_BYTES, Card
from emulated_cuda.errors import LOAD_BEFORE, DeviceError, TooLateError

MOST_DEVICES = 16
LIBRARY = "emulated_cuda._cuda"
NVML = "emulated_cuda._nvml"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which the module mmap does not name in every version


def check_available() -> tuple[int, int]:
    """Return the CUDA version of the installed torch, which is not imported.

    A machine may have a GPU of its own: programs without an emulated device go on using it.

    Raises:
        DeviceError: if this machine or this installation cannot emulate a device.
    """
    _check_platform()
    cuda = _cuda_of_torch()
    for module in (LIBRARY, NVML):
        path_of_compiled(module)
    return cuda


def nccl_version(cuda: tuple[int, int]) -> int:
    """Return the NCCL version that torch's build comes with, as NCCL writes it: 22907 for 2.29.7.

    Of a build whose version is not known, because it brings NCCL in another way, it is 2.27.5.
    """
    try:
        text = metadata.version(f"nvidia-nccl-cu{cuda[0]}")
        major, minor, patch = map(int, text.split(".")[:3])
    except (metadata.PackageNotFoundError, ValueError):
        major, minor, patch = 2, 27, 5
    return major * 10_000 + minor * 100 + patch


def check_wanted(card: Card, devices: int, total_bytes: int) -> None:
    """Refuse numbers that make no sense.

    Raises:
        DeviceError: says which numbers are possible.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise DeviceError(
            f"cannot emulate {devices} devices; write a number from 1 to {MOST_DEVICES}"
        )
    if total_bytes <= CONTEXT_BYTES:
        raise DeviceError(
            f"cannot emulate an {card.title} with {total_bytes >> 20:,} MB of memory, because the "
            f"CUDA context alone takes {CONTEXT_BYTES >> 20:,} MB; ask for more memory"
        )


def check_kernels(card: Card, cuda: tuple[int, int]) -> None:
    """Refuse a card that this CUDA version has no kernels for: a real one would not work either.

    Raises:
        DeviceError: names the card and the version.
    """
    capability = card.hardware.capability
    too_old = capability < (7, 5) and cuda >= (13, 0)
    too_new = capability >= (10, 0) and cuda < (12, 8)
    if too_old or too_new:
        raise DeviceError(
            f"torch for CUDA {cuda[0]}.{cuda[1]} has no kernels for the {card.title} (compute "
            f"capability {capability[0]}.{capability[1]}); name another card"
        )


def check_addresses(size: int) -> None:
    """Refuse a limit under which each allocation on the device would be out of memory.

    Raises:
        DeviceError: names the limits that are possible causes.
    """
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE).close()
    except OSError as error:
        raise DeviceError(
            f"the system refused the {size >> 30:,} GB of address space that an emulated CUDA "
            f"device reserves ({error.strerror}). Hardly any memory is used; run 'ulimit -v "
            "unlimited' first, and do not set vm.overcommit_memory to 2"
        ) from error


def check_no_driver_in_use() -> None:
    """Refuse a process that uses the driver of the machine's own GPU, or has loaded its NVML.

    That a machine has them does no harm: the linker finds a library that is loaded by its name,
    and so finds those of this package if they come first. The real driver comes first if torch
    was imported before: cuBLAS loads it, but starts it only when a device is looked for.

    Raises:
        TooLateError: names the library.
    """
    driver, nvml = mapped_path("libcuda.so"), mapped_path("libnvidia-ml.so")
    driver_in_use = nvml or (driver if driver is not None and _is_started(driver) else None)
    if driver_in_use is not None:
        raise TooLateError(
            "the emulated CUDA device comes too late: it replaces NVIDIA's driver, but this "
            f"process already uses {driver_in_use}; {LOAD_BEFORE}"
        )


def is_mapped(name: str) -> bool:
    """Whether a file whose name starts so is mapped into this process."""
    return mapped_path(name) is not None


def mapped_path(name: str) -> str | None:
    """Return the path of a file whose name starts so and that is mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if f"/{name}" in line:
                return line[line.index("/") :].strip()
    return None


def path_of_compiled(module: str) -> str:
    """Return the path of a compiled library of this package.

    Raises:
        DeviceError: if it was not compiled.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise DeviceError(
            f"an emulated CUDA device requires the compiled library {module}, which is missing "
            "from this installation; install g++ and reinstall pytest-cka-memory from source (pip "
            "install --force-reinstall --no-binary pytest-cka-memory pytest-cka-memory)"
        )
    return spec.origin


def torch_folder() -> Path:
    """Return the folder of the installed torch, which is not imported.

    Raises:
        DeviceError: if it is not installed.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise DeviceError(
            "an emulated CUDA device requires torch, which is not installed; run pip install torch"
        )
    return Path(spec.origin).parent


def _check_platform() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise DeviceError(
            "an emulated CUDA device requires Linux on x86-64, but this machine has "
            f"{sys.platform} on {machine}; run it on Linux, for example in CI, or measure on the "
            "CPU"
        )


def _is_started(driver: str) -> bool:
    """Whether the process has initialized this driver, as torch does to count devices."""
    count: Callable[..., int] | None = getattr(ctypes.CDLL(driver), "cuDeviceGetCount", None)
    return count is None or count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def _cuda_of_torch() -> tuple[int, int]:
    """Return the CUDA version of the installed torch, read without importing it."""
    text = torch_folder().joinpath("version.py").read_text(encoding="utf-8")
    version = re.search(r"__version__ = '([^']*)'", text)
    torch_version = version[1] if version else "unknown"
    cuda = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", text, re.MULTILINE)
    if cuda is None:
        raise DeviceError(
            f"an emulated CUDA device requires a CUDA build of torch, but torch {torch_version} "
            "was built without CUDA; install a CUDA build (on Linux: pip install torch), or "
            "measure on the CPU"
        )
    if int(cuda[1]) not in (12, 13):
        raise DeviceError(
            f"an emulated CUDA device requires torch for CUDA 12 or 13, but torch {torch_version} "
            f"is for CUDA {cuda[1]}.{cuda[2]}; install another build, or measure on the CPU"
        )
    return int(cuda[1]), int(cuda[2])
