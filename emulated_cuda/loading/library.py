"""The library in place of the CUDA runtime, and whether it can be in this process.

Nothing here imports torch. The library has to be loaded first: one that is loaded with RTLD_GLOBAL
before torch comes first when torch's libraries look for their functions, and its functions without
a version satisfy references to any version. The real CUDA runtime and cuBLAS are mapped as well and
never called. Packages that bring a runtime of their own get it, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import metadata
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emulated_cuda import activation, this_process
from emulated_cuda import torch_versions as versions
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
            f"capability {capability[0]}.{capability[1]}); write the name of another card"
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
            f"device reserves ({error.strerror}). The address space takes hardly any memory; run "
            "'ulimit -v unlimited' first, and do not set vm.overcommit_memory to 2"
        ) from error


def check_no_driver_in_use() -> None:
    """Refuse a process that uses the driver of the machine's own GPU, or has loaded its NVML.

    That a machine has them does no harm: the linker finds a library that is loaded by its name,
    and so finds those of this package if they come first. The real driver comes first if torch
    was imported before: cuBLAS loads it, but starts it only when a device is looked for.

    Raises:
        TooLateError: names the library.
    """
    started = filter(_is_started, mapped_paths("libcuda.so"))
    driver_in_use = next(iter([*mapped_paths("libnvidia-ml.so"), *started]), None)
    if driver_in_use is not None:
        raise TooLateError(
            "it is too late to load the emulated CUDA device: it replaces NVIDIA's driver, but "
            f"this process already uses {driver_in_use}; {LOAD_BEFORE}"
        )


def is_mapped(name: str) -> bool:
    """Whether a file whose name starts so is mapped into this process."""
    return bool(mapped_paths(name))


def mapped_paths(name: str) -> list[str]:
    """Return the paths of the files whose names start so and that are mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = [line[line.index("/") :].strip() for line in maps if f"/{name}" in line]
    return [*dict.fromkeys(found)]


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


_LEAST_ADDRESSES = 2**38
"""So many addresses are reserved for a device at least; they take no memory."""


class _Settings(ctypes.Structure):
    """``Settings`` in csrc/emulated.hpp; the library compares the sizes of both."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("major", "minor", "multiprocessors"),
                *("total_bytes", "context_bytes", "address_bytes"),
                *("shared_per_block", "shared_per_block_opt_in", "shared_per_multiprocessor"),
                *("l2_bytes", "threads_per_multiprocessor", "blocks_per_multiprocessor"),
                *("clock_khz", "memory_clock_khz", "memory_bus_bits"),
                *("power_watts", "pci_device"),
                *("devices", "cuda_version", "nccl_version"),
            )
        ),
    )


class Library:
    """The loaded library.

    Args:
        card: what it emulates.
        devices: how many of them.
        total_bytes: memory of each, with the CUDA context.

    Raises:
        DeviceError: if this process cannot have it.
    """

    def __init__(self, card: Card, devices: int, total_bytes: int) -> None:
        cuda = check_available()
        check_no_driver_in_use()
        check_kernels(card, cuda)
        settings = _settings(card, devices, total_bytes, cuda)
        check_addresses(devices * settings.address_bytes)
        self.path = path_of_compiled(LIBRARY)
        paths = [self.path, path_of_compiled(NVML)]
        self._is_late = is_mapped("libc10_cuda.so")
        libraries = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in paths]
        self._functions = libraries[0]
        size = ctypes.c_size_t(ctypes.sizeof(settings))
        if self._functions.emulated_configure(ctypes.byref(settings), size) != 0:
            raise DeviceError(
                f"{self.path} belongs to another version of emulated_cuda than the Python files; "
                "reinstall pytest-cka-memory"
            )
        try:
            if self._is_late:
                self._take_over_imported_torch()
            elif is_mapped("libcuda.so"):  # torch would find that by its name
                self._functions.emulated_take_over()
        except BaseException:
            self._functions.emulated_give_back()
            raise
        self._follow_libraries()
        replace_runtimes(self._functions)

    def keep_figures_in(self, path: str) -> None:
        """Keep what each device has had in use, and what it lacked, in a file that is created.

        Raises:
            OSError: if the file cannot be created.
        """
        error = self._functions.emulated_keep_figures_in(os.fsencode(path))
        if error:
            raise OSError(error, os.strerror(error), path)

    def refuse_launches(self, refuses: bool) -> None:
        """Refuse launches by the driver's functions: without torch no kernel is computed."""
        self._functions.emulated_refuse_launches(int(refuses))

    def set_late_events(self) -> None:
        """Answer that an event is not done until the host must know that it is."""
        self._functions.emulated_set_late_events(1)

    def leave_out_copies(self, leaves_out: bool) -> None:
        """Leave zeros on the device in the place of large copies from the host, or no longer.

        Large copies back leave pages of the host uncommitted that are zero on the device.
        """
        self._functions.emulated_leave_out_copies(int(leaves_out))

    def join(self, machine: str) -> None:
        """Let NVML of all processes of a machine know what this one has in use."""
        self._functions.emulated_join(machine.encode())

    def note_exit_status(self, status: int) -> None:
        """Note the exit status of a process that ends without calling C's ``exit``."""
        self._functions.emulated_note_exit_status(status)

    def _take_over_imported_torch(self) -> None:
        """Replace the runtime's functions in torch's libraries, which are loaded already.

        Raises:
            TooLateError: if torch has looked for devices before: it keeps the number it found.
        """
        folder = torch_folder() / "lib"
        self._functions.emulated_take_over()  # before MAGMA is loaded, which asks for devices then
        # torch loads these two when they are first needed, and would then find the real runtime.
        for library in versions.LATE_LIBRARIES.value:
            ctypes.CDLL(str(folder / library))
        self._functions.emulated_take_over()
        count = getattr(ctypes.CDLL(str(folder / "libc10_cuda.so")), versions.DEVICE_COUNT.value)
        count.restype = ctypes.c_int8
        visible = ctypes.c_int()  # none if CUDA_VISIBLE_DEVICES hides them all, as on a card
        self._functions.cuInit(0)
        self._functions.cuDeviceGetCount(ctypes.byref(visible))
        if count() == 0 and visible.value > 0:
            raise TooLateError(
                "it is too late to load the emulated CUDA device: this process has already asked "
                f"torch for CUDA devices, and torch remembers that there are none; {LOAD_BEFORE}"
            )
        # The real runtime was told which kernels there are, and CUB runs only what it was compiled
        # for. torch.cuda.get_arch_list() would forbid CUDA to processes that are forked later.
        kernels = this_process.address_of_section(versions.KERNELS.value, ".nvFatBinSegment")
        self._functions.emulated_earlier_kernels_are_in(ctypes.c_void_p(kernels))

    def _follow_libraries(self) -> None:
        """Compute values also for each library that is loaded from now on, such as torchvision's.

        If torch was imported before the emulated device, take it over as well: it would find the
        real runtime, which torch has made visible to all libraries, first.
        """
        for owner, name in (
            (ExtensionFileLoader, "create_module"),
            (ctypes.CDLL, "__init__"),  # torch.ops.load_library
        ):
            setattr(owner, name, self._then_follow(getattr(owner, name)))

    def _then_follow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def load_and_follow(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self._is_late:
                self._functions.emulated_take_over()
            activation.register_new_operators()
            return result

        return load_and_follow


def _settings(card: Card, devices: int, total_bytes: int, cuda: tuple[int, int]) -> _Settings:
    hardware = card.hardware
    return _Settings(
        name=hardware.name.encode(),
        major=hardware.capability[0],
        minor=hardware.capability[1],
        multiprocessors=hardware.multiprocessors,
        total_bytes=total_bytes,
        context_bytes=CONTEXT_BYTES,
        address_bytes=max(_LEAST_ADDRESSES, 4 * total_bytes),
        shared_per_block=48 * 2**10,
        shared_per_block_opt_in=hardware.block_shared_kib * 2**10,
        shared_per_multiprocessor=hardware.shared_kib * 2**10,
        l2_bytes=hardware.l2_mib * 2**20,
        threads_per_multiprocessor=hardware.threads,
        blocks_per_multiprocessor=hardware.blocks,
        clock_khz=hardware.clock_mhz * 1000,
        memory_clock_khz=hardware.memory_clock_mhz * 1000,
        memory_bus_bits=hardware.memory_bus_bits,
        power_watts=hardware.power_watts,
        pci_device=hardware.pci_device,
        devices=devices,
        cuda_version=cuda[0] * 1000 + cuda[1] * 10,
        nccl_version=nccl_version(cuda),
    )


# A runtime that is linked into a package statically is not replaced by the library. It asks the
# driver for private interfaces, which the emulated one does not have, and fails. The functions of
# cuda.bindings can be replaced all the same, because its modules pass them to each other in
# capsules when they are imported. CuPy's cannot, so its error says what to do.
_OF_BINDINGS = (
    "cuda.bindings._internal.runtime",
    "cuda.bindings._internal.runtime_ptds",
    "cuda.bindings._bindings.cyruntime",  # of CUDA 12
)
_OF_CUPY = "cupy_backends.cuda.api.runtime"
_ADVICE = (
    " (the emulated device does not support CuPy, because CuPy's own CUDA runtime requires "
    "NVIDIA's driver. Use torch or NumPy, or a GPU)"
)


def replace_runtimes(functions: ctypes.CDLL) -> None:
    """Replace the runtime of packages as soon as the program imports them.

    Args:
        functions: the library of the emulated device.
    """
    for module in _OF_BINDINGS:
        this_process.call_after(module, partial(_replace_capsules, module, functions))
    this_process.call_after(_OF_CUPY, _explain_errors_of_cupy)


def _replace_capsules(module: str, functions: ctypes.CDLL) -> None:
    api = ctypes.pythonapi
    get_name, get_pointer, set_pointer = (
        getattr(api, f"PyCapsule_{name}") for name in ("GetName", "GetPointer", "SetPointer")
    )
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    set_pointer.argtypes = [ctypes.py_object, ctypes.c_void_p]
    capsules: dict[str, Any] = getattr(sys.modules[module], "__pyx_capi__", {})
    replaced = {}
    for name, capsule in capsules.items():
        signature = get_name(capsule)
        ours = getattr(functions, name.lstrip("_"), None)
        if ours is not None and signature is not None and signature.startswith(b"cudaError_t "):
            address = ctypes.cast(ours, ctypes.c_void_p).value
            replaced[get_pointer(capsule, signature)] = address
            set_pointer(capsule, address)
    # If torch was imported before, modules have taken the pointers out of the capsules.
    array = ctypes.c_void_p * len(replaced)
    functions.emulated_replace_addresses(
        array(*replaced), array(*replaced.values()), ctypes.c_size_t(len(replaced))
    )


def _explain_errors_of_cupy() -> None:
    error = getattr(sys.modules[_OF_CUPY], "CUDARuntimeError", None)
    if error is None:
        return
    before = error.__init__

    def explain(self: Any, status: int) -> None:
        before(self, status)
        self.args = (f"{self.args[0]}{_ADVICE}",)

    error.__init__ = explain
