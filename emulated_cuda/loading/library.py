"""The library in place of the CUDA runtime, also for packages that bring a runtime of their own.

A library that is loaded with RTLD_GLOBAL before torch comes first when torch's libraries look for
their functions, and its functions without a version satisfy references to any version. The real
CUDA runtime and cuBLAS are mapped as well and never called.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import ExtensionFileLoader
from typing import Any

from emulated_cuda import activation, this_process
from emulated_cuda import torch_versions as versions
from emulated_cuda.cards import CONTEXT_BYTES, Card
from emulated_cuda.errors import LOAD_BEFORE, DeviceError, TooLateError
from emulated_cuda.loading import checks

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
        cuda = checks.check_available()
        checks.check_no_driver_in_use()
        checks.check_kernels(card, cuda)
        settings = _settings(card, devices, total_bytes, cuda)
        checks.check_addresses(devices * settings.address_bytes)
        self.path = checks.path_of_compiled(checks.LIBRARY)
        paths = [self.path, checks.path_of_compiled(checks.NVML)]
        self._is_late = checks.is_mapped("libc10_cuda.so")
        libraries = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in paths]
        self._functions = libraries[0]
        size = ctypes.c_size_t(ctypes.sizeof(settings))
        if self._functions.emulated_configure(ctypes.byref(settings), size) != 0:
            raise DeviceError(
                f"{self.path} belongs to another version of emulated_cuda than the Python files; "
                "reinstall pytest-cka-memory"
            )
        if self._is_late:
            self._take_over_imported_torch()
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
        folder = checks.torch_folder() / "lib"
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
            self._functions.emulated_give_back()
            raise TooLateError(
                "the emulated CUDA device comes too late: this process has already asked torch "
                f"for CUDA devices, and torch remembers that there are none; {LOAD_BEFORE}"
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
        nccl_version=checks.nccl_version(cuda),
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
