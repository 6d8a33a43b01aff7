"""What the meters take from torch's own code, which a version may change.

Each was seen in torch 2.9 to 2.15, if nothing else is said. Private names are in
:mod:`.torch_private`; what the emulated device takes is in :mod:`emulated_cuda.torch_versions`,
with the range of versions that were tried and the warning about others.
:mod:`pytest_cka_memory.reports.cards` reads sizes in the message of ``torch.OutOfMemoryError``.
"""

import torch

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
