"""Turn values on for the life of the process, and prepare the libraries that the program imports.

Values of torch's operators are computed at once, those of Triton's kernels when the program imports
Triton.

Compilers time several kernels and choose the fastest. On an emulated device times mean nothing, and
timing would allocate memory, which the user's figures would contain until the compilers' caches on
disk are filled. So the first kernel that the card can run is chosen, and profiles are labelled.

Without values, what a program saves are zeros. A training that is run for its memory alone would
write them over the weights of an earlier one, so files that were there are kept.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any

from emulated_cuda import this_process, torch_versions, triton
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
    this_process.call_after(torch_versions.PACKAGING.value[0], refuse)
    module = triton.MODULE
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        return
    # Not when the program imports Triton: that may be inside a region, which would count the
    # constants of these modules, or inside a transform of torch.func, which would wrap them.
    from emulated_cuda.triton import launches

    def prepare() -> None:
        launches.start(path)
        triton.note_compiled(launches.note_compiled)

    this_process.call_after(module, prepare)


def register_new_operators() -> None:
    """Compute also the operators of a library that was loaded after torch, such as torchvision."""
    if _is_on:
        from emulated_cuda.values import registration

        registration.register_all()


_OPERATOR = 1  # Phase in csrc/emulated.hpp: kernels that are launched now have no effect


def leave_out(path: str) -> None:
    """Let Triton and Inductor choose without measuring, as soon as the program imports them.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    from emulated_cuda import torch_private  # not before torch is imported

    set_phase = ctypes.PyDLL(path).emulated_set_phase

    @contextlib.contextmanager
    def without_effect() -> Iterator[None]:
        before = set_phase(_OPERATOR)
        try:
            yield
        finally:
            set_phase(before)

    this_process.call_after(triton.MODULE, partial(triton.choose_first_valid, without_effect))
    for module in torch_versions.MEASURING.value:
        this_process.call_after(module, partial(torch_private.measure_no_kernels, module))


NO_TIMES = "emulated: device times are not known (the times shown are those of calls on the host)"


def label_profiles() -> None:
    """Let tables and traces of torch's profiler say that their device times are not a card's."""
    from emulated_cuda import torch_private

    torch_private.label_profiles(NO_TIMES)


SUFFIX = ".no-values"
"""What is added to the name of a file that takes the place of another."""
_own: dict[str, str] = {}
"""Path that the program named -> where its contents went."""


def work_without_values() -> None:
    """Keep files that exist, and let pass what programs would read back and stop at zeros.

    Ranks tell each other sizes by way of the host, and checks of values pass.
    """
    _keep_existing_files()
    _send_over_gloo()
    this_process.call_after("torch", _pass_checks)


def _keep_existing_files() -> None:
    """Let ``torch.save`` and safetensors write beside a file that exists, instead of over it.

    ``torch.load`` and safetensors read in the same process what was written there.
    """
    this_process.call_after("torch", _in_torch)
    this_process.call_after("safetensors.torch", _in_safetensors)


def _in_torch() -> None:
    import torch

    torch.save = _to_own(torch.save, position=1, keyword="f")
    torch.load = _from_own(torch.load, keyword="f")


def _in_safetensors() -> None:
    import safetensors.torch as safetensors

    safetensors.save_file = _to_own(safetensors.save_file, position=1, keyword="filename")
    safetensors.load_file = _from_own(safetensors.load_file, keyword="filename")


def _to_own(function: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
    @wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], _own_path(args[position]), *args[position + 1 :])
        elif keyword in kwargs:
            kwargs[keyword] = _own_path(kwargs[keyword])
        return function(*args, **kwargs)

    return save


def _from_own(function: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    @wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_written(args[0]), *args[1:])
        elif keyword in kwargs:
            kwargs[keyword] = _written(kwargs[keyword])
        return function(*args, **kwargs)

    return load


def _own_path(file: Any) -> Any:
    """Return where to write what a program saves in `file`, which is often a path."""
    if not isinstance(file, (str, os.PathLike)):
        return file
    path = os.path.abspath(os.fsdecode(file))
    if path not in _own:
        exists = os.path.isfile(path) and not path.endswith(SUFFIX)
        _own[path] = path + SUFFIX if exists else path
        if exists:
            print(
                f"emulated_cuda: {os.fsdecode(file)} is not overwritten, because no values are "
                "computed and all tensors to save are zeros; the zeros are saved in "
                f"{os.fsdecode(file)}{SUFFIX} instead",
                file=sys.stderr,
            )
    return file if _own[path] == path else _own[path]


def _written(file: Any) -> Any:
    if not isinstance(file, (str, os.PathLike)):
        return file
    path = os.path.abspath(os.fsdecode(file))
    return file if _own.get(path, path) == path else _own[path]


def _pass_checks() -> None:
    """Let checks of unknown values pass, after they have taken the memory that they take on a card.

    Of zeros, ``torch.distributions`` would refuse a scale, and a training would end because its
    loss is not finite: what is finite is computed by comparisons, whose results are zeros, too.
    """
    import torch

    from emulated_cuda import torch_private

    name = torch_versions.ALL_TRUE.value
    if hasattr(torch, name):
        setattr(torch, name, _true_on_device(getattr(torch, name)))
    is_finite = torch.isfinite
    torch.isfinite = _true_on_device(is_finite)
    torch_private.let_scripts_call(torch.isfinite, is_finite)
    torch.Tensor.isfinite = _true_on_device(torch.Tensor.isfinite)  # type: ignore[method-assign]


def _true_on_device(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check whose result is true if it is a single one, of what is on the device."""
    import torch

    @wraps(check)
    def passing(*args: Any, **kwargs: Any) -> Any:
        result = check(*args, **kwargs)
        # Not what a program traces or compiles: a proxy, or a tensor that stands for several.
        is_traced = type(result) is not torch.Tensor or torch.compiler.is_compiling()
        if is_traced or result.dim() or not result.is_cuda:
            return result
        if not torch.cuda.is_current_stream_capturing():
            # Copies of single numbers from the host are made without values, too.
            result.copy_(torch.ones((), dtype=torch.bool, device="cpu"))
        return result

    return passing


def _send_over_gloo() -> None:
    """Have the collectives of objects use a group of Gloo with the same ranks.

    ``all_gather_object`` and its like send pickled bytes in tensors on the device, and read back
    sizes that operators have compared. Without values no operator compares, so these would be zero.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        return
    for name in torch_versions.OBJECT_COLLECTIVES.value:
        function = _over_gloo(getattr(distributed, name))
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, name, function)


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch import distributed

    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        group = bound.get("group") or distributed.group.WORLD
        if group is not None and "nccl" in distributed.get_backend(group):
            bound["group"] = _twin(group)
            bound.pop("device", None)
        return function(**bound)

    return call


@cache
def _twin(group: Any) -> Any:
    """Return a group of Gloo with the same ranks, which all make it at the same call."""
    from torch import distributed

    ranks = distributed.get_process_group_ranks(group)
    return distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
