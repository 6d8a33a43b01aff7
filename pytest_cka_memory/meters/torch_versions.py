"""How one torch differs from another: what its version does, how it is built and how it is set.

Build and settings, and the processor on which torch runs, are facts on which figures depend: those
of ``core.conditions.FACTS``. What is taken from torch's own code may change with a version; it was
seen in torch 2.9 to 2.15, if nothing else is said. Private names are in :mod:`.torch_private`; what
the emulated device takes is in :mod:`emulated_cuda.torch_versions`, with the range of versions that
were tried and the warning about others. :mod:`pytest_cka_memory.reports.cards` reads sizes in the
message of ``torch.OutOfMemoryError``.
"""

import os
import platform
import re
from collections.abc import Callable, Mapping

import torch

from pytest_cka_memory.meters import torch_private

FREES_ONLY_OBJECTS = torch.__version__ < "2.10"
"""Whether a collection may free the Python object of a storage that stays live, as in torch 2.9."""

KEEPS_WORKSPACES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether the workspace of a matrix product of cuBLAS is kept for the next one."""

REFUSED_NUMBER = "Expected a value of type 'Tensor' for argument"
"""In the error of an operator that does not start, because a number is passed for a tensor."""

DEVICE_IS_FULL = ("out of memory", "STATUS_ALLOC_FAILED")
"""What the driver, cuBLAS and cuDNN report outside torch's allocator, as a ``RuntimeError``."""

HOST_IS_FULL = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough")
"""What torch's CPU allocator reports on Linux and macOS, and on Windows."""


def is_out_of_memory(error: BaseException, device: str) -> bool:
    """Return whether `error` was raised because `device` has too little memory.

    Args:
        error: any exception.
        device: a device as torch names it: ``cpu``, ``cuda:0``. An accelerator's tests may exhaust
            the memory of the host instead; that is not memory of `device`.
    """
    if device.partition(":")[0] == "cpu":
        texts = HOST_IS_FULL
        if isinstance(error, MemoryError):
            return True
    else:
        texts = DEVICE_IS_FULL
        if isinstance(error, torch.OutOfMemoryError):
            return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def facts_of_kernels() -> dict[str, str]:
    """Return the facts of a meter that counts the memory of the CPU's kernels."""
    return _read({**_COMMON, **_OF_CPU})


def facts_of_accelerator(device: str) -> dict[str, str]:
    """Return the facts of an accelerator's meter, also of an emulated one."""
    return _read({**_COMMON, **(_OF_CUDA if "cuda" in device else {})})


def facts_of_operators() -> dict[str, str]:
    """Return the facts of a meter that counts tensors, not the memory of kernels."""
    return _read(_COMMON)


def processor_name() -> str:
    """Return the name of this machine's processor as the system shows it: ``AMD EPYC 9B45``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "cpu"


def _read(readers: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Return what differs from the usual."""
    values = {fact: read() for fact, read in readers.items()}
    return {fact: value for fact, value in values.items() if value}


def _instruction_set() -> str:
    parts = [torch.backends.cpu.get_cpu_capability(), *(["AMX"] if torch_private.has_amx() else [])]
    most = [os.environ.get(f"{prefix}_MAX_CPU_ISA") for prefix in ("ONEDNN", "DNNL")]
    return ", ".join([*parts, *(f"oneDNN at most {isa}" for isa in most if isa)])


def _onednn() -> str:
    is_used = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return "" if is_used else "off"


def _blas() -> str:
    library = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return library[1] if library else ""


def _cudnn() -> str:
    cudnn = torch.backends.cudnn
    if not cudnn.enabled or not cudnn.is_available():
        return "off"
    return f"{cudnn.version()}{', benchmark' if cudnn.benchmark else ''}"


def _tf32() -> str:
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set in a way that this function does not know
        return "mixed"
    return "" if precision == "highest" else precision


def _variables(pattern: str) -> str:
    names = (name for name in sorted(os.environ) if re.fullmatch(pattern, name))
    return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ[name])


_COMMON: Mapping[str, Callable[[], str]] = {
    "deterministic": lambda: "on" if torch.are_deterministic_algorithms_enabled() else "",
    "compile": lambda: _variables(
        r"(TORCHINDUCTOR|TORCHDYNAMO|TORCH_COMPILE)_(?!.*(CACHE|DIR|PATH)).*"
    ),
}
_OF_CPU: Mapping[str, Callable[[], str]] = {
    "threads": lambda: str(torch.get_num_threads()),
    "instruction_set": _instruction_set,
    "processor": processor_name,
    "onednn": _onednn,
    "blas": _blas,
}
_OF_CUDA: Mapping[str, Callable[[], str]] = {
    "cudnn": _cudnn,
    "cublas": lambda: _variables(r"CUBLAS(LT)?_WORKSPACE_(CONFIG|SIZE)"),
    "allocator": lambda: _variables(
        r"PYTORCH_((CUDA|HIP)_)?ALLOC_CONF|PYTORCH_NO_CUDA_MEMORY_CACHING"
    ),
    "tf32": _tf32,
}
