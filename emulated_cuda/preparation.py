"""Prepare libraries that the program imports for an emulated device.

Compilers time several kernels and choose the fastest. On an emulated device times mean nothing, and
timing would allocate memory, which the user's figures would contain until the compilers' caches on
disk are filled. So the first kernel that the card can run is chosen, and profiles are labelled.

Without values, what a program saves are zeros. A training that is run for its memory alone would
write them over the weights of an earlier one, so files that were there are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any

from emulated_cuda import imports, torch_versions, triton_private

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

    imports.call_after(
        triton_private.MODULE, partial(triton_private.choose_first_valid, without_effect)
    )
    for module in torch_versions.MEASURING.value:
        imports.call_after(module, partial(torch_private.measure_no_kernels, module))


NO_TIMES = "emulated: no device times are known (those shown are of calls on the host)"


def label_profiles() -> None:
    """Let tables and traces of torch's profiler say that their device times are not a card's."""
    from emulated_cuda import torch_private

    torch_private.label_profiles(NO_TIMES)


SUFFIX = ".no-values"
"""What is added to the name of a file that takes the place of another."""
_own: dict[str, str] = {}
"""Path that the program named -> where its contents went."""


def work_without_values() -> None:
    """Keep files that exist, and send the sizes that ranks tell each other by way of the host."""
    _keep_existing_files()
    _send_over_gloo()


def _keep_existing_files() -> None:
    """Let ``torch.save`` and safetensors write beside a file that exists, instead of over it.

    ``torch.load`` and safetensors read in the same process what was written there.
    """
    imports.call_after("torch", _in_torch)
    imports.call_after("safetensors.torch", _in_safetensors)


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
