"""Operators that are computed in another way than on the CPU: by layout, type or argument.

- Sparse tensors (COO, CSR, CSC, BSR and BSC): how many elements a result has depends on values, so
  results are computed on the CPU and put into memory of the device.
- Division of integers by zero: the CPU raises an error, a card does not. A quotient that is rounded
  down is 0 then (`div_floor_integer` of PyTorch; before torch 2.12 it was not defined). Other
  roundings and remainders by zero are not defined there.
- Singular values with a driver of cuSOLVER: the CPU refuses to be given one.
- Sums, products with a factor and others in half precision, which a card computes in single
  precision and rounds once: the CPU rounds twice.
- Products of quantized tensors, for which cuDNN finds no plan without a GPU.
- Numbers in place of tensors, as in ``x * 2``: torch wraps the number in a tensor of the lowest
  priority for the type of the result, and gives the number to kernels in Python, but its own
  kernels then refuse it. They get a tensor of the type that leads to the same result.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.torch_versions import NOT_A_TENSOR
from emulated_cuda.values import (
    alias,
    graphs,
    on_cpu,
    operators,
    own_output,
    replace,
    staleness,
    upload,
)
from emulated_cuda.values.computing import names_of_outs, on_the_cpu
from emulated_cuda.values.operators import Kernel, Unavailable, tensors_in, thread

ROUNDED_DOWN = (
    *("floor_divide", "floor_divide.out", "floor_divide_.Tensor"),
    *("div.Tensor_mode", "div.out_mode", "div_.Tensor_mode"),
)
"""Operators that divide, with rounding down as the only or one possible mode."""


def zero_by_zero(divide: Kernel) -> Kernel:
    """Return a kernel for the CPU that divides; quotients of integers by 0 are 0."""

    def call(self: Any, other: Any, **kwargs: Any) -> Any:
        is_down = kwargs.get("rounding_mode", "floor") == "floor"
        if not is_down or torch.result_type(self, other).is_floating_point:
            return divide(self, other, **kwargs)
        if not isinstance(other, torch.Tensor):
            quotient = divide(self, other or 1, **kwargs)
            return quotient if other else quotient.zero_()
        zero = other == 0
        if not zero.any():
            return divide(self, other, **kwargs)
        return divide(self, torch.where(zero, 1, other), **kwargs).masked_fill_(zero, 0)

    return call


def quantized_kernel(name: str) -> Kernel | None:
    """Return the kernel for an operator on quantized tensors and packed weights.

    None for one that only packs or unpacks a weight: torch's own kernel does that on the CPU.
    """
    if "pack" in name:
        return None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} is not supported by the emulated device, because cuDNN cannot plan it "
            "without a GPU. Compute it on the CPU, or dequantize() its input and packed weight "
            "and use the floating-point operator, or use a GPU"
        )

    return kernel


SPARSE_KEYS = ("SparseCUDA", "SparseCsrCUDA")


def sparse_kernel(name: str, cuda_kernel: Kernel) -> Kernel:
    """Return a kernel that computes an operator with sparse arguments after torch's own kernel.

    It is made when the operator first runs, because a program uses few of them.
    """

    @cache
    def made() -> Kernel:
        operator = torch_private.operator_of(name)
        return _sparse_kernel(name, operator, accepting_numbers(operator, cuda_kernel))

    return lambda *args, **kwargs: made()(*args, **kwargs)


def _sparse_kernel(name: str, operator: Any, original: Kernel) -> Kernel:
    schema = torch_private.schema_of(operator)
    written = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    names = [argument.name for argument in schema.arguments]
    outs = names_of_outs(operator)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, *args, **kwargs)
        graphs.refuse(name)
        if staleness.is_possible():
            staleness.check((args, kwargs))
        results = None
        # It may read back what its own kernels have not written, and fail without a user's mistake.
        with contextlib.suppress(Unavailable, RuntimeError, IndexError, ValueError):
            if not written:
                results = operators.run(original, keyset, args, kwargs)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        with on_the_cpu():
            on_host = {
                key: own_output(value) if key in outs else on_cpu(value)
                for key, value in named.items()
            }
            for key in written:  # the CPU's operator may resize the parts of a sparse tensor
                value = on_host.get(key)
                if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                    on_host[key] = value.clone()
            computed = operator(
                *[on_host[key] for key in names[: len(args)]],
                **{key: on_host[key] for key in kwargs},
            )
            if not written and _is_written(results, computed):
                return _known(results, named)
            results = None  # torch's operator could not know the size, which depends on values
            if not written and not any(True for _ in tensors_in(computed)):
                return computed  # a Python number, which needs no memory of the device
            for key in written:
                if named.get(key) is not None:
                    _copy_back(named[key], on_host[key])
        if written:
            return named[written[0]] if len(written) == 1 else tuple(named[key] for key in written)
        return _uploaded(computed, named)

    return kernel


def _uploaded(computed: Any, named: Any) -> Any:
    device = next(tensor.device for tensor in tensors_in(named) if tensor.is_cuda)
    with on_the_cpu():
        return _known(upload(computed, device), named)


def _known(results: Any, named: Any) -> Any:
    """Return new results: a kernel that ran earlier has written nothing into them."""
    if staleness.is_possible():  # the arguments were checked before, so none makes these stale
        staleness.propagate((), results, arguments=named)
    return results


def _is_written(results: Any, computed: Any) -> bool:
    """Write into the parts of the operator's own result, if they have the sizes to be computed."""
    if not isinstance(results, torch.Tensor) or not isinstance(computed, torch.Tensor):
        return False
    if results.layout is not computed.layout or results.shape != computed.shape:
        return False
    pairs = list(zip(_parts(results), _parts(computed), strict=True))
    if any(result.shape != other.shape or result.dtype != other.dtype for result, other in pairs):
        return False
    if results.layout is torch.sparse_coo and results.is_coalesced() != computed.is_coalesced():
        return False
    for target, value in pairs:
        alias(target).copy_(value)
    return True


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return torch_private.sparse_parts(tensor)
    return (*torch_private.compressed_parts(tensor), tensor.values())


def _copy_back(target: torch.Tensor, computed: torch.Tensor) -> None:
    """Give an argument on the device what the operator has written into its CPU form."""
    if target.layout is not torch.strided:
        target.copy_(upload(computed, target.device))
    elif alias(target).data_ptr() != computed.data_ptr():
        replace(target, computed)


_NUMBERS = (int, float, bool, complex)
_NOT_OPERANDS = ("condition", "mask", "out")


def accepting_numbers(operator: Any, kernel: Kernel) -> Kernel:
    """Return torch's kernel of an operator so that it also accepts numbers for tensors."""
    arguments = torch_private.schema_of(operator).arguments
    positions = [
        index
        for index, argument in enumerate(arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]") and not argument.kwarg_only
    ]
    operands = [index for index in positions if arguments[index].name not in _NOT_OPERANDS]
    if len(positions) < 2:
        return kernel

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for index in positions:
            if index < len(args) and type(args[index]) in _NUMBERS:
                others = [args[i] for i in operands if i < len(args)]
                # Not tuple(), here and in other places of this package: of a generator, CPython
                # makes ten places and keeps fewer, and then keeps the tuple for later. So the
                # collector counts each as new and none as freed, and it would collect the program's
                # garbage earlier than without values.
                args = (
                    *(
                        _tensor_for(value, others) if position in positions else value
                        for position, value in enumerate(args)
                    ),
                )
                break
        return kernel(keyset, *args, **kwargs)

    return call


def if_refused(operator: Any) -> Kernel:
    """Return an operator for the CPU that accepts numbers for tensors, as precise as torch's."""
    with_tensors = accepting_numbers(operator, lambda _, *args, **kwargs: operator(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return operator(*args, **kwargs)
        except RuntimeError as error:
            if NOT_A_TENSOR.value not in str(error):
                raise
            return with_tensors(None, *args, **kwargs)

    return call


# ---- Numbers in tensors on the device: torch cannot pass them to a kernel in Python ----


def power_of_number(original: Kernel) -> Kernel:
    """Return the kernel of a number's power, by way of that for two tensors."""
    of_tensors = torch.library.get_kernel("aten::pow.Tensor_Tensor", "CUDA").call_boxed

    def call(keyset: Any, base: Any, exponent: torch.Tensor) -> Any:
        if base == 1:
            return original(keyset, base, exponent)
        dtype = torch.result_type(exponent, base)
        with torch_private.without_torch_function():
            number = torch.empty((), dtype=dtype, device=exponent.device)
        return of_tensors(keyset, number, exponent)

    return call


def power_of_number_out(original: Kernel) -> Kernel:
    """Return the same for a kernel with ``out``."""
    of_tensors = torch.library.get_kernel("aten::pow.Tensor_Tensor_out", "CUDA").call_boxed

    def call(keyset: Any, base: Any, exponent: torch.Tensor, *, out: torch.Tensor) -> Any:
        if base == 1:
            return original(keyset, base, exponent, out=out)
        dtype = torch.result_type(exponent, base)
        with torch_private.without_torch_function():
            number = torch.empty((), dtype=dtype, device=exponent.device)
        return of_tensors(keyset, number, exponent, out=out)

    return call


def _tensor_for(value: Any, others: list[Any]) -> Any:
    if type(value) not in _NUMBERS:
        return value
    tensor = next((other for other in others if isinstance(other, torch.Tensor)), None)
    if tensor is None:
        return torch.tensor(value)
    dtype = torch.result_type(tensor, value)
    try:
        return torch.scalar_tensor(value, dtype=dtype, device="cpu")  # faster than torch.tensor
    except (RuntimeError, OverflowError, TypeError):  # the number does not fit; it is not used
        return torch.tensor(1, dtype=dtype)


@dataclass(frozen=True)
class Argument:
    """A keyword argument of an operator, whatever the user gave for it."""

    name: str
    on_cpu: Any
    """The value with which the CPU computes what a card does."""
    source: str
    """Where torch says what a card does."""


_LEAST_SQUARES = Argument(
    "driver",
    "gels",
    "torch.linalg.lstsq: driver=None means 'gelsy' on the CPU and 'gels' on CUDA, where 'gels' is "
    "the only valid driver",
)
_SINGULAR_VALUES = Argument(
    "driver",
    None,
    "torch.linalg.svd: driver= selects a method of cuSOLVER and is valid only for CUDA inputs; "
    "the results of all methods are decompositions of the same matrix",
)
CARD_ARGUMENTS = {
    "aten::linalg_lstsq": _LEAST_SQUARES,
    "aten::linalg_lstsq.out": _LEAST_SQUARES,
    "aten::_linalg_svd": _SINGULAR_VALUES,
    "aten::_linalg_svd.U": _SINGULAR_VALUES,
}
"""Operator -> the argument that must have another value on the CPU to give a card's results.
Torch's own CUDA operator runs first, so what a card refuses, such as ``driver="gelsd"`` of
``lstsq``, is refused in torch's words. Operators for whose arguments the CPU has no such value,
such as ``pivot=False`` of LU, are in :mod:`.equivalents`."""


def as_on_a_card(name: str, compute: Kernel) -> Kernel:
    """Return a function for the CPU that computes an operator as a card does."""
    argument = CARD_ARGUMENTS.get(name)
    if argument is None:
        return compute
    replaced = {argument.name: argument.on_cpu}
    return lambda *args, **kwargs: compute(*args, **{**kwargs, **replaced})


_HALF = (torch.float16, torch.bfloat16)
# In half precision, the CPU kernels of the operators below round an intermediate result (a product,
# the argument of a logarithm), and then the result again. A card rounds only the result.
_SUMS = "aten/src/ATen/native/ufunc/add.h and cuda/CUDALoops.cuh: opmath_t"
_LISTS = "aten/src/ATen/native/cuda/ForeachBinaryOp*.cu: opmath_t"
_LOGIT = "aten/src/ATen/native/cuda/UnarySpecialOpsKernel.cu: logit_kernel_cuda, T_ACC"
_UNIFORM = "aten/src/ATen/native/cuda/DistributionTemplates.h: uniform_kernel, which draws floats"
ROUNDED_ONCE = {
    **{
        f"aten::{base}{overload}": _SUMS
        for base in ("add", "sub", "rsub")
        for overload in (".Tensor", "_.Tensor", ".out", ".Scalar", "_.Scalar")
    },
    **{
        f"aten::_foreach_{base}{end}.{overload}": _LISTS
        for base in ("add", "sub")
        for end in ("", "_")
        for overload in ("List", "Scalar", "ScalarList", "Tensor")
    },
    **dict.fromkeys(("aten::logit", "aten::logit_", "aten::logit.out"), _LOGIT),
    "aten::uniform_": _UNIFORM,
}
"""Operator -> where torch's kernel for CUDA computes it in single precision."""


def rounded_once(name: str, compute: Kernel) -> Kernel:
    """Return a function for the CPU that computes an operator in single precision if it is one."""
    if name not in ROUNDED_ONCE:
        return compute
    is_in_place = name.partition(".")[0].endswith("_")
    is_uniform = name == "aten::uniform_"

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (_is_half(args[0]) or (len(args) > 1 and _is_half(args[1]))):
            return compute(*args, **kwargs)
        wide = [_widened(value) for value in args]
        out = kwargs.get("out")
        if out is not None:
            computed = compute(*wide, **{**kwargs, "out": torch.empty(0)})
            return out.resize_(computed.shape).copy_(computed)
        computed = compute(*wide, **kwargs)
        if not is_in_place:
            return computed  # it is rounded when it is written into the result
        targets, values = (x if isinstance(x, list) else [x] for x in (args[0], wide[0]))
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        if is_uniform:
            start, end = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
            args[0].masked_fill_(args[0] == end, start)  # a card draws no number that is the end
        return args[0]

    return call


def _is_half(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype in _HALF
    return isinstance(value, list) and any(map(_is_half, value))


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(item) for item in value]
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value
