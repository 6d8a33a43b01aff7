"""What the emulated device takes from torch's own code, which a version may change.

Each row has the value that the code uses, and the versions in which it was seen. If a new torch
version changes one, this is the place to mend it. Larger tables are where they are used:

- operators whose results have a size that torch reads back, and in which order it reads:
  ``BY_VALUES`` and ``GUIDED`` in :mod:`.values.reading`
- operators that only allocate, only call others, or launch kernels of their own:
  :mod:`.values.registration`, and the ``..._PARTS`` of :mod:`.torch_private`
- operators that only CUDA has, each with the file of torch from which its formula is:
  :mod:`.values.equivalents`
- functions of CUDA's libraries that torch calls, those of NCCL and of CUDA graphs among them: torch
  2.9, 2.14 and 2.15 import them, and ``tests/emulated/test_symbols.py`` compares what the installed
  torch imports with what the library defines
- names of Triton that are replaced: :mod:`.triton`; operations in the text of its kernels:
  :mod:`.triton.ttir`. Both were seen with Triton 3.5 (torch 2.9) to 3.9 (torch 2.15), and
  ``tests/emulated/compiled`` compares the table with the installed Triton

What differs between versions in these tables is found by feature, not by the version's number:

- ``repeat_interleave``, ``linalg_eig`` and ``segment_reduce`` read back truth values about their
  arguments (2.9 to 2.15; ``repeat_interleave`` to 2.14, ``normal`` with a tensor of deviations to
  2.13): the type of the number that is read says so, and ``normal`` is a check in a kernel later
- ``bincount`` reads its smallest and its largest number, ``unique_dim`` the number of rows twice
  (2.9 to 2.15): the order of reads
- ``ldexp`` calls other operators in 2.9 and 2.10, and has one kernel for all devices from 2.11: by
  where it is registered
- a nested tensor's heads are padded to a multiple of 8 (2.9 to 2.15; up to 2.11 also for heads of
  size 4): the formula of torch's CUDA operator
- ``_scaled_mm_v2`` exists from 2.10, ``_flash_attention_forward_no_dropout_inplace`` from 2.12:
  whether the operator exists

Nothing here imports torch, because the device is loaded before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Generic, TypeVar

Value = TypeVar("Value")
Version = tuple[int, int]


@dataclass(frozen=True)
class Row(Generic[Value]):
    """One thing that is taken from torch."""

    value: Value
    what: str
    """What it is, and what happens with a version that has it no longer."""
    oldest: Version = (2, 9)
    newest: Version = (2, 15)
    """The versions in which it was seen."""


# ---- Names ----

NEEDED_NAMES = Row(
    (
        "torch.library.get_kernel",  # public since torch 2.10
        "torch._C._dispatch_get_registrations_for_dispatch_key",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C.DispatchKeySet",
        "torch._C.DisableTorchFunction",
        "torch._conj",
        "torch._neg_view",
    ),
    "private names of torch that the emulated device uses to compute values; if this torch "
    "version lacks one, values=on is refused",
)
DEVICE_COUNT = Row(
    "_ZN3c104cuda12device_countEv",
    "c10::cuda::device_count() in libc10_cuda.so; called if torch is imported before the emulated "
    "device is loaded",
)
LATE_LIBRARIES = Row(
    ("libcaffe2_nvrtc.so", "libtorch_cuda_linalg.so"),
    "libraries that torch loads when they are first needed",
)
KERNELS = Row("libtorch_cuda.so", "the library with most of torch's CUDA kernels")
BACKWARD_THREAD = Row(
    "pt_autograd", "prefix of the names of the threads in which torch runs backward passes"
)
OBJECT_COLLECTIVES = Row(
    ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    "functions of torch.distributed that send Python objects in tensors on the device and read "
    "their sizes back; if no values are computed, the emulated device sends these objects over "
    "Gloo",
)
ALL_TRUE = Row(
    "_is_all_true",
    "function of torch by which torch.distributions reads back whether its arguments are valid; if "
    "no values are computed, it is true for tensors on the device. Where it is missing, pass "
    "validate_args=False",
)
SINGULAR = Row("_LinAlgError", "name of torch's error for a matrix that cannot be decomposed")
MEASURING = Row(
    ("torch._inductor.runtime.triton_heuristics", "torch._inductor.select_algorithm"),
    "modules in which Inductor times kernels to choose the fastest; if this torch version lacks "
    "them, the choice of kernels, and so the measured memory, may depend on what Inductor has "
    "cached",
)
LIBRARY_CHOICE = Row(
    "ExternKernelCaller",
    "Inductor's class for calling a kernel of a library, such as cuBLAS, instead of generating one",
)
PACKAGING = Row(
    ("torch._inductor.compile_fx", "compile_fx_aot"),
    "function that AOTInductor uses to compile a model; if this torch version lacks it, the "
    "outputs of a compiled package (.pt2) have no values, and reading them raises an error that "
    "names the kernel",
)
INDUCTOR_SETTINGS = Row(
    {"TORCHINDUCTOR_BENCHMARK_EPILOGUE_FUSION": "0", "TORCHINDUCTOR_SHAPE_PADDING": "0"},
    "environment variables that make Inductor take two of its decisions without timing kernels, "
    "because timing allocates memory",
)

# ---- English texts of errors and warnings ----

OVERRIDE_WARNING = Row(
    "Warning only once for all operators",
    "start of the warning that torch prints when a kernel replaces one of its own for the first "
    "time",
    newest=(2, 12),
)
NOT_A_TENSOR = Row(
    "Expected a value of type 'Tensor'",
    "part of torch's error for a number that is passed in place of a tensor; if this torch words "
    "the error differently, such calls compute no value",
)
REFUSED = Row(
    re.compile(
        "is not supported by the emulated device"
        "|RUNTIME_PREREQUISITE_MISSING"  # cuDNN asks the driver
        "|INTERNAL ASSERT FAILED"  # about what a kernel would have written
    ),
    "errors of a CUDA operator that fails only because there is no GPU; other errors are raised "
    "to the user",
)
UNSUPPORTED = Row(
    re.compile(
        r"not implemented for|not supported on CPU|Could not run|not support|only supported|"
        r"not been implemented|is not available for|unsupported|expected scalar type|"
        r"must have the same dtype|same dtype|to have the same dtype|not compiled with",
        re.IGNORECASE,
    ),
    "errors of an operator that does not support these types on the CPU; the emulated device then "
    "tries single precision, and if that fails too, the result has no value",
)
ABOUT_VALUES = Row(
    re.compile(
        r"out of (range|bounds)|index|invalid multinomial|probability|is invalid|nonzero value|"
        r"should be between 0 and 1|must be (>=|in the)|non-negative|negative|"
        r"expects all elements of|to be true, but got false",
        re.IGNORECASE,
    ),
    "errors by which an operator on the CPU refuses a value, such as an index out of range; the "
    "emulated device raises them as a device-side assert; after any other error the result is "
    "left without a value",
)


OLDEST_TRIED = (2, 9)
NEWEST_TRIED = (2, 15)
"""Major and minor version; raise it after all tests have passed with a newer one."""

RANGE = f"{OLDEST_TRIED[0]}.{OLDEST_TRIED[1]} to {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}"
"""The range as texts name it."""


def warning_about(version: str | None) -> str | None:
    """Return what to tell the user of a version that is newer than those tried; otherwise None.

    Args:
        version: such as ``2.16.0.dev20270110+cu132``; None if torch is not installed.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) <= NEWEST_TRIED:
        return None
    return (
        f"emulated_cuda has not been tried with torch {numbers[1]}.{numbers[2]}. torch's own "
        "allocator still counts the memory of tensors, but other figures may be wrong"
    )


# ---- Settings ----

_ALLOC_CONF = "PYTORCH_ALLOC_CONF"
_ALLOC_CONF_SINCE = (2, 11)
"""Seen to work from 2.11.0. 2.9.1 warns about the older name, and ignores this one."""


@cache
def allocator_variable() -> str:
    """Return the environment variable that has the allocator's settings in the installed torch."""
    try:
        major, minor = metadata.version("torch").split(".")[:2]
        is_new = (int(major), int(minor)) >= _ALLOC_CONF_SINCE
    except (metadata.PackageNotFoundError, ValueError):  # as a source build may have it
        is_new = True
    return _ALLOC_CONF if is_new else "PYTORCH_CUDA_ALLOC_CONF"
