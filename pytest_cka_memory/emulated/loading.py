"""Load the library that takes the place of the CUDA runtime, so that torch finds devices.

A library that is loaded with RTLD_GLOBAL before torch comes first when torch's libraries look for
their functions, and its functions without a version satisfy references to any version. The real
CUDA runtime and cuBLAS are mapped as well and never called.

Nothing here imports torch: the library has to be loaded first. What follows is one call, early in
the process (in pytest: ``pytest_load_initial_conftests`` with ``tryfirst=True``)::

    from pytest_cka_memory.emulated import loading

    loading.load("a100")
    import torch

    torch.cuda.get_device_name()  # "NVIDIA A100-SXM4-80GB"

No kernel runs. :mod:`pytest_cka_memory.emulated.values` computes on the CPU what kernels would
have computed. With ``values=False`` no value is computed: device memory holds what was copied
there, and zeros elsewhere; ``.item()`` and other small reads return 0 after a kernel was launched.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.cards import CONTEXT_BYTES, Card, card_of
from pytest_cka_memory.emulated import after_torch, children, cudnn_attention, graphs, shutdown
from pytest_cka_memory.emulated import torch_versions as versions
from pytest_cka_memory.emulated.specification import EMULATED, MOST_DEVICES, Specification
from pytest_cka_memory.emulated.values import activation
from pytest_cka_memory.errors import DeviceError

_LIBRARY = "pytest_cka_memory.emulated._cuda"
_NVML = "pytest_cka_memory.emulated._nvml"
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
_LEAST_ADDRESSES = 2**38  # open_window() in csrc/memory.cpp reserves so many for a device
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which the module mmap does not name in every version


class TooLateError(DeviceError):
    """Torch has looked for devices before, and found none."""


@dataclass(frozen=True)
class Loaded:
    """What this process emulates."""

    card: Card
    devices: int
    total_bytes: int
    """Memory of each device, of which the CUDA context takes some."""
    values: bool = True
    """Whether values are asked for."""

    @property
    def title(self) -> str:
        """The device as every report names it."""
        return Specification(self.card).title


class _Settings(ctypes.Structure):
    """``Settings`` in csrc/emulated.hpp."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("major", "minor", "multiprocessors", "total_bytes", "context_bytes"),
                *("shared_per_block", "shared_per_block_opt_in", "shared_per_multiprocessor"),
                *("l2_bytes", "threads_per_multiprocessor", "blocks_per_multiprocessor"),
                *("clock_khz", "memory_clock_khz", "memory_bus_bits"),
                *("devices", "cuda_version"),
            )
        ),
    )


_loaded: Loaded | None = None
_library: ctypes.CDLL | None = None  # a reference for the life of the process


def is_loaded() -> bool:
    """Whether this process emulates a CUDA device."""
    return _loaded is not None


def loaded() -> Loaded | None:
    """Return what this process emulates; None if it emulates nothing."""
    return _loaded


def card() -> Card | None:
    """Return the card that this process emulates; None if it emulates nothing."""
    return None if _loaded is None else _loaded.card


def load(
    card_name: str | None = None,
    devices: int = 1,
    total_bytes: int | None = None,
    values: bool | None = None,
) -> None:
    """Make torch find emulated CUDA devices in this process, and in those it spawns.

    A second call with the same arguments changes nothing.

    Args:
        card_name: a key of ``CARDS``; None for the default card.
        devices: how many such cards there are, before ``CUDA_VISIBLE_DEVICES`` is applied.
        total_bytes: memory of each; None for that of the card. The CUDA context takes 512 MB of
            it.
        values: whether operators compute values; None to compute them if the torch version can,
            and whatever an earlier call has chosen.

    Raises:
        DeviceError: if the device cannot be emulated here, or no longer. The message says why, what
            was found and what to do.
    """
    global _loaded, _library
    wanted_card = card_of(card_name or "")
    total = wanted_card.total_bytes if total_bytes is None else total_bytes
    if not 1 <= devices <= MOST_DEVICES:
        raise DeviceError(
            f"cannot emulate {devices} devices; write a number from 1 to {MOST_DEVICES}"
        )
    if total <= CONTEXT_BYTES:
        raise DeviceError(
            f"the emulated device cannot have {total >> 20:,} MB of memory, because the CUDA "
            f"context takes {CONTEXT_BYTES >> 20:,} MB of it; give it more"
        )
    by_default = True if _loaded is None else _loaded.values
    wanted = Loaded(wanted_card, devices, total, by_default if values is None else values)
    if _loaded is not None:
        _check_same(_loaded, wanted)
        return
    cuda = check_available()
    _check_kernels(wanted_card, cuda)
    _check_addresses(devices * max(_LEAST_ADDRESSES, 4 * total))
    paths = [_compiled(_LIBRARY), _compiled(_NVML)]
    is_late = _is_mapped("libc10_cuda.so")
    libraries = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in paths]
    _library = libraries[0]
    _library.emulated_configure(ctypes.byref(_settings(wanted, cuda)))
    if is_late:
        _take_over_imported_torch()
    _follow_libraries(is_late)
    _loaded = wanted
    _prepare_environment(paths[0])
    after_torch.call(partial(_prepare_torch, paths[0], wanted.values, values is True))
    children.call_in_children(load, wanted_card.name, devices, total, values)
    atexit.register(shutdown.wait_for_backward_threads)


# ---- Checks ----


def check_available() -> tuple[int, int]:
    """Return the CUDA version of the installed torch, which is not imported.

    Raises:
        DeviceError: if this machine or this installation cannot emulate a device.
    """
    _check_platform()
    _check_no_driver()
    cuda = _cuda_of_torch()
    for module in (_LIBRARY, _NVML):
        _compiled(module)
    return cuda


def _check_same(existing: Loaded, wanted: Loaded) -> None:
    if existing != wanted:
        raise DeviceError(
            f"this process already emulates {_described(existing)}, and {_described(wanted)} was "
            f"asked for; use one device per process"
        )


def _described(loaded: Loaded) -> str:
    values = "" if loaded.values else ", without values"
    memory = f"{loaded.total_bytes >> 20:,} MB each"
    return f"{loaded.devices} × {loaded.card.title} with {memory}{values}"


def _check_platform() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise DeviceError(
            f"{EMULATED} requires Linux on x86-64, and this is {sys.platform} on {machine}; "
            f"run it on such a machine, for example in CI, or use cpu"
        )


def _check_no_driver() -> None:
    found = next((path for path in _DRIVER_FILES if os.path.exists(path)), None)
    if found is not None:
        raise DeviceError(
            f"{EMULATED} would hide this machine's GPU from torch: {found} exists, so an NVIDIA "
            f"driver is present; use cuda, or run on a machine without a GPU"
        )
    if _is_mapped("libcuda.so"):
        raise DeviceError(
            f"{EMULATED} takes the place of the CUDA driver, and another libcuda.so is loaded in "
            f"this process already; load nothing that uses it before torch"
        )


def _cuda_of_torch() -> tuple[int, int]:
    """Return the CUDA version of the installed torch, read without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise DeviceError(f"{EMULATED} requires torch, which is not installed; install it")
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"__version__ = '([^']*)'", text)
    torch_version = version[1] if version else "unknown"
    cuda = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", text, re.MULTILINE)
    if cuda is None:
        raise DeviceError(
            f"{EMULATED} requires a CUDA build of torch, and {torch_version} is not one; install "
            f"one (on Linux: pip install torch), or use cpu"
        )
    if int(cuda[1]) not in (12, 13):
        raise DeviceError(
            f"{EMULATED} supports builds of torch for CUDA 12 and 13, and {torch_version} is for "
            f"CUDA {cuda[1]}.{cuda[2]}; install another, or use cpu"
        )
    return int(cuda[1]), int(cuda[2])


def _check_kernels(wanted: Card, cuda: tuple[int, int]) -> None:
    """Refuse a card that this CUDA version has no kernels for: a real one would not work either."""
    capability = wanted.hardware.capability
    too_old = capability < (7, 5) and cuda >= (13, 0)
    too_new = capability >= (10, 0) and cuda < (12, 8)
    if too_old or too_new:
        raise DeviceError(
            f"torch for CUDA {cuda[0]}.{cuda[1]} has no kernels for the {wanted.title} (compute "
            f"capability {capability[0]}.{capability[1]}); name another card"
        )


def _check_addresses(size: int) -> None:
    """Refuse a limit under which each allocation on the device would be out of memory."""
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE).close()
    except OSError as error:
        raise DeviceError(
            f"{EMULATED} reserves {size >> 30:,} GB of addresses, though hardly any memory, and "
            f"this process may not ({error.strerror}); set 'ulimit -v unlimited' and do not set "
            f"vm.overcommit_memory to 2"
        ) from error


def _compiled(module: str) -> str:
    """Return the path of a compiled library of this package."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise DeviceError(
            f"{EMULATED} requires a library that is compiled when pytest-cka-memory is installed, "
            f"and {module} is missing; install g++ and reinstall pytest-cka-memory from source "
            f"(pip install --force-reinstall --no-binary pytest-cka-memory pytest-cka-memory)"
        )
    return spec.origin


def _is_mapped(name: str) -> bool:
    """Whether a file whose name starts so is mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(f"/{name}" in line for line in maps)


# ---- Loading ----


def _settings(wanted: Loaded, cuda: tuple[int, int]) -> _Settings:
    hardware = wanted.card.hardware
    return _Settings(
        name=hardware.name.encode(),
        major=hardware.capability[0],
        minor=hardware.capability[1],
        multiprocessors=hardware.multiprocessors,
        total_bytes=wanted.total_bytes,
        context_bytes=CONTEXT_BYTES,
        shared_per_block=48 * 2**10,
        shared_per_block_opt_in=hardware.block_shared_kib * 2**10,
        shared_per_multiprocessor=hardware.shared_kib * 2**10,
        l2_bytes=hardware.l2_mib * 2**20,
        threads_per_multiprocessor=hardware.threads,
        blocks_per_multiprocessor=hardware.blocks,
        clock_khz=hardware.clock_mhz * 1000,
        memory_clock_khz=hardware.memory_clock_mhz * 1000,
        memory_bus_bits=hardware.memory_bus_bits,
        devices=wanted.devices,
        cuda_version=cuda[0] * 1000 + cuda[1] * 10,
    )


def _take_over_imported_torch() -> None:
    """Replace the runtime's functions in torch's libraries, which are loaded already.

    Raises:
        DeviceError: if torch has looked for devices before: it keeps the number it found.
    """
    assert _library is not None
    # torch loads these two when they are first needed, and would then find the real runtime first.
    for library in versions.LATE_LIBRARIES.value:
        ctypes.CDLL(str(_torch_folder() / "lib" / library))
    _library.emulated_take_over()
    name = versions.DEVICE_COUNT.value
    count = getattr(ctypes.CDLL(str(_torch_folder() / "lib" / "libc10_cuda.so")), name)
    count.restype = ctypes.c_int8
    if count() == 0 and os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "":
        _library.emulated_give_back()
        raise TooLateError(
            f"{EMULATED} comes too late: torch was imported in this process and asked for CUDA "
            f"devices, and it keeps the answer that there are none; load the emulated device "
            f"before, or do not call torch.cuda.is_available(), torch.cuda.device_count() or "
            f"torch.accelerator at the top of a conftest.py, a plugin or a module"
        )


def _follow_libraries(is_late: bool) -> None:
    """Compute values also for each library that is loaded from now on, such as torchvision's.

    If torch was imported before the emulated device, take it over as well: it would find the real
    runtime, which torch has made visible to all libraries, first.
    """
    for owner, name in (
        (ExtensionFileLoader, "create_module"),
        (ctypes.CDLL, "__init__"),  # torch.ops.load_library
    ):
        setattr(owner, name, _then_follow(getattr(owner, name), is_late))


def _then_follow(function: Callable[..., Any], is_late: bool) -> Callable[..., Any]:
    @wraps(function)
    def load_and_follow(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if _library is not None and is_late:
            _library.emulated_take_over()
        activation.register_new_operators()
        return result

    return load_and_follow


def _prepare_torch(path: str, values: bool, required: bool) -> None:
    """Change what torch, which is imported now, does with the emulated device."""
    cudnn_attention.switch_off()
    graphs.refuse_captures(path)
    if not (values and activation.turn_on(path, required=required)):
        cudnn_attention.refuse_calls()


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _prepare_environment(library: str) -> None:
    """Set the variables by which Triton finds this driver and Numba does not look for one."""
    os.environ.setdefault("NUMBA_DISABLE_CUDA", "1")  # Numba would crash with this driver
    # Inductor's worker processes do not have this device, and end without a message.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "TRITON_LIBCUDA_PATH" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="emulated-cuda-")
    for name in ("libcuda.so", "libcuda.so.1"):  # which one depends on the version of Triton
        os.symlink(library, os.path.join(folder, name))
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
