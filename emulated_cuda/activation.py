"""Turn values on for the life of the process.

Those of torch's operators at once, and those of Triton's kernels when the program imports Triton.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from functools import partial

from emulated_cuda import imports, torch_versions, triton_private
from emulated_cuda.errors import WITHOUT_VALUES, DeviceError

_ON = ("1", "true", "on", "yes", "y")
"""The values, in lower case, with which Triton regards a switch as on."""
_is_on = False
_reason: str | None = None
"""What torch lacks, if values were to be computed and are not."""
_NO_PACKAGES = (
    "AOTInductor is not supported on the emulated device, which cannot run the machine code that "
    "AOTInductor writes. Compile the model with torch.compile, run the program that torch.export "
    f"returns, or use a GPU. To measure memory only, {WITHOUT_VALUES}"
)


def are_computed() -> bool:
    """Whether values are computed in this process."""
    return _is_on


def warnings() -> list[str]:
    """Return what may be wrong with the values in this process; some is known once torch is here.

    Triton's interpreter stores bfloat16 as integers of 16 bits, which ``tl.dot`` multiplies so.
    """
    problems = [] if _reason is None else [f"no values are computed: {_reason}"]
    if os.environ.get("TRITON_INTERPRET", "").lower() in _ON:
        problems.append(
            "TRITON_INTERPRET is set, and Triton's interpreter computes products of bfloat16 "
            "matrices wrongly without raising an error. Values that Triton kernels write may be "
            "wrong; unset TRITON_INTERPRET"
        )
    return problems


def turn_on(path: str, *, required: bool) -> bool:
    """Compute values from now on, if the imported version of torch can; return whether it can.

    Args:
        path: of the library of the emulated device, which is loaded.
        required: raise if the torch version cannot; otherwise no values are computed then, and
            :func:`warnings` says why.

    Raises:
        DeviceError: names what the torch version lacks, if values are required.
    """
    global _is_on, _reason
    import torch

    from emulated_cuda import torch_private

    missing = torch_private.missing()
    if missing:
        _reason = (
            f"torch {torch.__version__} lacks {', '.join(missing)}, and the emulated device needs "
            f"them to compute values; install a tested version (torch {torch_versions.RANGE}), or "
            f"{WITHOUT_VALUES}"
        )
        if required:
            raise DeviceError(_reason)
        return False
    from emulated_cuda.values import graphs, operators, registration, staleness

    functions = operators.Library(path)
    operators.use_library(functions)
    registration.register_all()
    staleness.answer_nccl(path)
    torch_private.disable_fusion()
    functions.compute_values(1)
    _follow_triton(path)
    graphs.start(path)
    atexit.register(graphs.stop)
    _is_on = True
    return True


def _follow_triton(path: str) -> None:
    """Compute the kernels of Triton as soon as the program imports it.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    from emulated_cuda import torch_private

    refuse = partial(torch_private.refuse_packages, _NO_PACKAGES)
    imports.call_after(torch_versions.PACKAGING.value[0], refuse)
    module = triton_private.MODULE
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        return
    # Not when the program imports Triton: that may be inside a region, which would count the
    # constants of these modules, or inside a transform of torch.func, which would wrap them.
    from emulated_cuda.triton import launches

    def prepare() -> None:
        launches.start(path)
        triton_private.note_compiled(launches.note_compiled)

    imports.call_after(module, prepare)


def register_new_operators() -> None:
    """Compute also the operators of a library that was loaded after torch, such as torchvision."""
    if _is_on:
        from emulated_cuda.values import registration

        registration.register_all()
