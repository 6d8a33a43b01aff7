"""Put kernels that compute values before torch's CUDA kernels, in every thread.

A kernel is found by the dispatcher after autograd, autocast, the user's modes, subclasses and
``torch.func``, and in backward threads as well. So values need no mode and no context.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.values import reading, special, write
from emulated_cuda.values.computing import (
    compute_after,
    compute_first,
    names_of_outs,
    not_computed,
)
from emulated_cuda.values.equivalents import (
    EQUIVALENTS,
    attention,
    by_name,
    normalization,
    others,
    products,
    recurrent,
)
from emulated_cuda.values.operators import Kernel
from emulated_cuda.values.special import (
    accepting_numbers,
    as_on_a_card,
    if_refused,
    power_of_number,
    power_of_number_out,
    rounded_once,
)

FAMILIES = (attention, normalization, others, products, recurrent)
"""The modules that enter their functions into ``EQUIVALENTS`` when they are imported."""
_KEY = "CUDA"
_QUANTIZED = "QuantizedCUDA"
_NESTED = "NestedTensorCUDA"
_PARTS = {
    **dict.fromkeys(special.SPARSE_KEYS, torch_private.SPARSE_PARTS),
    _QUANTIZED: torch_private.QUANTIZED_PARTS,
    _NESTED: torch_private.NESTED_PARTS,
}
"""For each key the operators that need no computation of their own."""
_LEFT_ALONE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::record_stream",
    "aten::is_set_to",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::_efficientzerotensor",
    "aten::_fused_sdp_choice",
    "aten::_use_cudnn_ctc_loss",
    "aten::_use_cudnn_ctc_loss.Tensor",
    "aten::_use_miopen_ctc_loss",
    "aten::_use_miopen_ctc_loss.Tensor",
}
"""Operators that write no values: they allocate, or look at shapes."""
_COMPOSITES = {
    "aten::_nested_tensor_from_mask",
    "aten::_nested_tensor_from_mask_left_aligned",
    "aten::isin.Tensor_Tensor",
    "aten::isin.Tensor_Tensor_out",
}
"""Operators that only call others, which compute, and choose them by values they read back."""
_WITHOUT_CUDA_KERNEL = (
    *("aten::copy_", "aten::convolution_backward"),
    *("aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_", "aten::mode.values"),
)
"""Operators whose kernel is the same for all devices and launches CUDA kernels itself.

In torch versions in which one of them only calls others, as ``ldexp`` in 2.9, those are computed.
"""
_OTHER_PACKAGES = {
    *("symm_mem", "c10d", "fsdp", "quantized", "_native", "quantization", "inductor_prims"),
}
"""Namespaces whose operators are distributed or compiled, or refused for quantized tensors."""

_SUBSTITUTES: dict[str, Callable[[Kernel], Kernel]] = {
    "aten::pow.Scalar": power_of_number,
    "aten::pow.Scalar_out": power_of_number_out,
}
"""What runs in place of torch's CUDA kernel: one that passes another a number in a tensor on the
device."""

_OWN_KERNELS: dict[str, Callable[[str, Any, Kernel], Kernel]] = {
    "aten::copy_": lambda name, operator, original: accepting_numbers(
        operator, reading.copying(original)
    ),
    "aten::_local_scalar_dense": lambda name, operator, original: reading.reading_a_number(
        original, operator
    ),
    "aten::zero_": lambda name, operator, original: reading.zeroing(original, operator),
    "aten::equal": lambda name, operator, original: compute_first(original, operator),
    "aten::_cudnn_rnn_flatten_weight": lambda name, operator, original: recurrent.flatten_weights(
        original
    ),
    **dict.fromkeys(reading.GUIDED, reading.guided),
    **dict.fromkeys(reading.BY_VALUES, reading.sized),
}
"""Operators for which it is not enough to run torch's kernel and compute its result afterwards ->
what makes their kernel of name, operator and torch's kernel. All others are rows of ``EQUIVALENTS``
(:mod:`.equivalents`), or have the CPU's kernel of the same name."""

_libraries: dict[str, torch.library.Library] = {}
_known: set[tuple[str, str]] = set()


def register_all() -> None:
    """Register a kernel for every CUDA operator that torch has now and had not at the last call."""
    for_all_devices = {*torch_private.registered("CompositeExplicitAutograd")}
    on_cpu = {*torch_private.registered("CPU"), *for_all_devices}
    launching = for_all_devices.intersection(_WITHOUT_CUDA_KERNEL)
    registered = [(_KEY, name) for name in (*torch_private.registered(_KEY), *sorted(launching))]
    registered += [(key, name) for key in _PARTS for name in torch_private.registered(key)]
    registered.append((_QUANTIZED, "aten::copy_"))
    new = [entry for entry in registered if entry not in _known]
    _known.update(new)
    # All kernels are made before the first is registered: some call torch's kernel of another.
    kernels = [
        (key, name, _kernel_of(name, name in on_cpu) if key == _KEY else _other_kernel(key, name))
        for key, name in new
    ]
    _known.update((key, name) for key, name, _ in kernels)
    if not kernels:
        return
    with torch_private.unreported_overrides():
        for key, name, kernel in kernels:
            if kernel is not None:
                namespace, _, rest = name.partition("::")
                torch_private.put_before(_library(namespace), rest, kernel, key)
    torch_private.never_compiled(kernel for _, _, kernel in kernels if kernel is not None)


def _other_kernel(key: str, name: str) -> Kernel | None:
    """Return the kernel for sparse, quantized or nested tensors."""
    if name.startswith("quantized::"):
        return special.quantized_kernel(name)
    if name.partition("::")[0] in _OTHER_PACKAGES or not _has_own_results(name):
        return None
    base = name.partition("::")[2].partition(".")[0]
    if base in _PARTS[key] or name in _LEFT_ALONE:
        return None
    cuda_kernel = torch.library.get_kernel(name, getattr(torch.DispatchKey, key)).call_boxed
    if key in special.SPARSE_KEYS:
        return special.sparse_kernel(name, cuda_kernel)
    if name == "aten::copy_":
        operator = torch_private.operator_of(name)
        return accepting_numbers(
            operator, reading.copying(accepting_numbers(operator, cuda_kernel))
        )
    return compute_after(name, partial(_parts, name, cuda_kernel))


def _parts(name: str, cuda_kernel: Kernel) -> tuple[Any, Kernel, Kernel]:
    """Return an operator, its CUDA kernel, and its equivalent or else the CPU's kernel."""
    operator = torch_private.operator_of(name)
    return operator, accepting_numbers(operator, cuda_kernel), _compute_of(name, operator)


def _parts_with_out(name: str, cuda_kernel: Kernel) -> tuple[Any, Kernel, Kernel]:
    """Return the same for an operator with ``out`` that has the equivalent of one without."""
    operator = torch_private.operator_of(name)
    compute = by_name(operator, EQUIVALENTS[_functional_name(name)].function)
    return operator, accepting_numbers(operator, cuda_kernel), _into_out(operator, compute)


def _compute_of(name: str, operator: Any) -> Kernel:
    if name in EQUIVALENTS:
        return by_name(operator, EQUIVALENTS[name].function)
    if name.removeprefix("aten::") in special.ROUNDED_DOWN:
        return special.zero_by_zero(if_refused(operator))
    return rounded_once(name, as_on_a_card(name, if_refused(operator)))


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _kernel_of(name: str, has_cpu_kernel: bool) -> Kernel | None:
    """Return the kernel to put before torch's; None to leave that in place."""
    left_alone = name in _LEFT_ALONE | _COMPOSITES or name.partition("::")[0] in _OTHER_PACKAGES
    if left_alone or not _has_own_results(name):
        return None
    kernel = torch.library.get_kernel(name, torch.DispatchKey.CUDA)
    if _is_in_python(name, kernel):
        return None
    cuda_kernel: Kernel = kernel.call_boxed
    if name in _SUBSTITUTES:
        cuda_kernel = _SUBSTITUTES[name](cuda_kernel)
    if name in _OWN_KERNELS:
        operator = torch_private.operator_of(name)
        return _OWN_KERNELS[name](name, operator, accepting_numbers(operator, cuda_kernel))
    if name not in EQUIVALENTS and _functional_name(name) in EQUIVALENTS:
        return compute_after(name, partial(_parts_with_out, name, cuda_kernel))
    if name not in EQUIVALENTS and not has_cpu_kernel:
        operator = torch_private.operator_of(name)
        original = accepting_numbers(operator, cuda_kernel)
        return not_computed(name, operator, original, "the CPU has no such operator")
    return compute_after(name, partial(_parts, name, cuda_kernel))


def _is_in_python(name: str, kernel: Any) -> bool:
    """Whether a user's kernel is a Python function: the operators that it calls are computed."""
    return not name.startswith("aten::") and ".py:" in repr(kernel)  # where it was registered


def _functional_name(name: str) -> str:
    """Return the name of the operator without ``out`` of one with ``out``."""
    base, _, overload = name.partition(".")
    overload = overload.removesuffix("out").removesuffix("_")
    return f"{base}.{overload}" if overload else base


def _has_own_results(name: str) -> bool:
    """Whether torch has the operator, and it returns no views, which share an argument's memory."""
    schema = torch_private.schema_by_name(name)
    return schema is not None and not any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


def _into_out(operator: Any, compute: Kernel) -> Kernel:
    """Return a function that writes what `compute` returns into the ``out`` arguments."""
    names = names_of_outs(operator)

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = [kwargs.pop(name) for name in names]
        computed = compute(*args, **kwargs)
        write(outputs, computed if len(names) > 1 else [computed])
        return outputs if len(names) > 1 else outputs[0]

    return call
