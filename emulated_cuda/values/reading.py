"""Operators that copy or read values: copies, single numbers, and sizes that depend on values.

If a result has a size that depends on values, it is computed first. Then torch's CUDA operator
runs, and where it reads the size back from the device it gets the computed one, so it allocates as
on a card, temporaries included. If it still returns another size, the computed result is put into
memory of the right size instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.values import (
    alias,
    device_assert,
    graphs,
    is_assert,
    on_cpu,
    operators,
    replace,
    staleness,
    upload,
    write,
)
from emulated_cuda.values.computing import compute_after, names_of_outs, on_the_cpu
from emulated_cuda.values.operators import (
    COPY,
    OPERATOR,
    OUTSIDE,
    Kernel,
    Unavailable,
    is_argument_of_running,
    tensors_in,
    thread,
)

Answers = Callable[[Any, Any], list[int]]
"""Arguments on the CPU and the computed result -> the numbers that the operator reads back."""


def _rows(args: Any, result: Any) -> list[int]:
    return [int(result.shape[0])]


def _first_rows(args: Any, result: Any) -> list[int]:
    return [int(result[0].shape[0])]


def _unique_rows(args: Any, result: Any) -> list[int]:
    """How many rows are unique along a dimension, read back by each step of the algorithm."""
    dim = args[1] if len(args) > 1 else 0
    return [int(result[0].shape[dim])] * 2


def _smallest_and_largest(args: Any, result: Any) -> list[int]:
    values = args[0]
    return [int(values.min()), int(values.max())] if values.numel() else []


def _total(args: Any, result: Any) -> list[int]:
    return [int(args[0].sum())]


def _masks(args: Any, result: Any) -> list[int]:
    """How many elements each boolean index selects."""
    return [
        int(torch.count_nonzero(index))
        for index in args[1]
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
    ]


def _selected(args: Any, result: Any) -> list[int]:
    return [int(result.numel())]


def _nothing(args: Any, result: Any) -> list[int]:
    return []


BY_VALUES: dict[str, Answers] = {
    "aten::nonzero": _rows,
    "aten::nonzero.out": _rows,
    "aten::masked_select": _selected,
    "aten::masked_select.out": _selected,
    "aten::index.Tensor": _masks,
    "aten::index.Tensor_out": _masks,
    "aten::_index_put_impl_": _masks,
    "aten::_unique": _first_rows,
    "aten::_unique2": _first_rows,
    "aten::unique_consecutive": _first_rows,
    "aten::unique_dim": _unique_rows,
    "aten::unique_dim_consecutive": _unique_rows,
    "aten::bincount": _smallest_and_largest,
    "aten::repeat_interleave.Tensor": _total,
    "aten::linalg_eig.out": _nothing,
    "aten::linalg_eigvals.out": _nothing,
    "aten::segment_reduce": _nothing,
    "torchvision::nms": _nothing,
}
"""Operator -> what it reads back."""
GUIDED = (
    "aten::linalg_matrix_exp",
    "aten::linalg_eig",
    "aten::_linalg_eigvals",
    "aten::_nested_from_padded",
)
"""Operators that call others, but launch kernels too."""
_ONLY_WITH_MASKS = ("aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_")


def sized(name: str, operator: Any, original: Kernel) -> Kernel:
    """Return a kernel that computes the result before it allocates."""
    answers = BY_VALUES[name]
    schema = torch_private.schema_of(operator)
    is_functional = not schema.is_mutable
    outs = names_of_outs(operator)
    usual = compute_after(name, lambda: (operator, original, operator))
    compute = _functional_form(name, operator) if outs else operator
    needs_mask = name in _ONLY_WITH_MASKS

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, *args, **kwargs)
        if needs_mask and not _has_mask(args[1]):
            return usual(keyset, *args, **kwargs)
        if graphs.is_capturing():
            operators.run(original, keyset, args, kwargs)  # reads its size back, which raises
            graphs.refuse(name)
        if staleness.is_possible():
            staleness.check(args[1] if needs_mask else (args, kwargs))
        with on_the_cpu():
            on_host = [on_cpu(value) for value in args]
            if is_functional or outs:
                options = {key: on_cpu(v) for key, v in kwargs.items() if key not in outs}
                try:
                    computed = compute(*on_host, **options)
                except (RuntimeError, IndexError) as error:
                    if not is_assert(error):
                        raise
                    raise device_assert(name, error) from error
            else:
                computed = None
            announced = answers(on_host, computed)
        library = operators.library()
        for number in announced:
            library.announce(number)
        try:
            if computed is None:
                return usual(keyset, *args, **kwargs)
            results = _results(original, keyset, args, kwargs)
        finally:
            library.forget_answers()
        return _with_values(results, computed, args, kwargs, outs)

    return kernel


def guided(name: str, operator: Any, original: Kernel) -> Kernel:
    """Return a kernel for a composite operator that reads values which its own operators compute.

    The inner operators compute their values while the composite one runs, so it reads the right
    values and allocates as on a card. Kernels that it launches directly do nothing, so its result
    is computed on the CPU before, and is written into what it returns.
    """

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, *args, **kwargs)
        graphs.refuse(name)
        if staleness.is_possible():
            staleness.check((args, kwargs))
        with on_the_cpu():
            computed = operator(*map(on_cpu, args), **{k: on_cpu(v) for k, v in kwargs.items()})
        with staleness.ignored_work():
            try:
                results = original(keyset, *args, **kwargs)
            except (RuntimeError, IndexError, ValueError):  # it read what its kernels did not write
                results = None
        return _with_values(results, computed, args, kwargs)

    return kernel


def _results(original: Kernel, keyset: Any, args: Any, kwargs: Any) -> Any:
    """Return what torch's operator returns; None if it fails because values are not there.

    The CPU has computed the operator before. So if torch's operator finds that a matrix cannot be
    decomposed, it has read a status that no kernel wrote.
    """
    try:
        return operators.run(original, keyset, args, kwargs, checks_pass=True)
    except (Unavailable, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None


def _with_values(
    results: Any, computed: Any, args: Any, kwargs: Any, outs: Sequence[str] = ()
) -> Any:
    with on_the_cpu():
        written = _written(results, computed, args, [kwargs[name] for name in outs])
        if staleness.is_possible():  # the arguments were checked before, so none makes these stale
            staleness.propagate((), written, arguments=(args, kwargs))
    return written


def _written(results: Any, computed: Any, args: Any, targets: list[torch.Tensor]) -> Any:
    if targets:
        for target, value in zip(targets, tensors_in(computed), strict=True):
            replace(target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)
    if results is not None and _fit(results, computed):
        write(results, computed)
        return results
    device = next(tensor.device for tensor in tensors_in(args) if tensor.is_cuda)
    return upload(computed, device)


def _fit(results: Any, computed: Any) -> bool:
    """Whether all results have the computed shape; further ones may be left out, so are empty."""
    pairs = enumerate(zip(tensors_in(results), tensors_in(computed), strict=True))
    return all(
        _shape_of(result) == _shape_of(value) or (position > 0 and result.numel() == 0)
        for position, (result, value) in pairs
    )


def _shape_of(tensor: torch.Tensor) -> Any:
    """Return the shape of a tensor, or those of its parts if it is nested."""
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in indices
    )


def _functional_form(name: str, operator: Any) -> Any:
    base = name.removesuffix("_out").removesuffix(".out")
    return torch_private.operator_of(base) or operator


_LARGE = 2**16  # bytes that are worth giving back to the machine when they become zero


def copying(original: Kernel) -> Kernel:
    """Return the kernel of ``copy_``."""

    def kernel(keyset: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
        if thread.arguments is not None:
            return _copy_inside(original, keyset, target, source, non_blocking)
        if graphs.is_capturing():
            return _record_copy(original, keyset, target, source, non_blocking)
        may_be_stale = staleness.is_possible()
        if may_be_stale and target.device.type == "cpu":
            staleness.check(source)
        operators.run(original, keyset, (target, source, non_blocking), {}, COPY)
        with on_the_cpu():
            alias(target).copy_(alias(source))
        if may_be_stale:
            staleness.propagate((target, source), target, overwrites=True)
        return target

    return kernel


def _record_copy(original: Kernel, keyset: Any, target: Any, source: Any, block: bool) -> Any:
    """Copy at each replay of the graph that is captured."""
    operators.run(original, keyset, (target, source, block), {}, COPY)
    with on_the_cpu():
        aliases = alias(target), alias(source)

    def copy(seed: int) -> None:
        with on_the_cpu():
            aliases[0].copy_(aliases[1])

    graphs.record(copy, source, target)
    return target


def _copy_inside(original: Kernel, keyset: Any, target: Any, source: Any, block: bool) -> Any:
    """Copy for another operator; one that reads its own argument gets the true values."""
    reads = target.device.type == "cpu" and source.is_cuda and is_argument_of_running(source)
    if not reads:
        return original(keyset, target, source, block)
    with on_the_cpu():
        return target.copy_(alias(source))


def reading_a_number(original: Kernel, operator: Any) -> Kernel:
    """Return the kernel of ``_local_scalar_dense``, which ``item()`` calls.

    Some operators read back whether their arguments are valid. Here they always are: if not, the
    CPU's operator raises the error.
    """

    def kernel(keyset: Any, tensor: Any) -> Any:
        if thread.arguments is not None:
            is_argument = is_argument_of_running(tensor)
            is_check = thread.checks_pass and tensor.dtype is torch.bool
            if not is_argument and not is_check:
                return original(keyset, tensor)
            phase = operators.library().set_phase(OUTSIDE)  # so that no announced size is read
            try:
                value = original(keyset, tensor)
            finally:
                operators.library().set_phase(phase)
            if is_argument:
                return value
            thread.has_checked = True
            return True
        if staleness.is_possible() and not graphs.is_capturing():
            staleness.check(tensor)
        operators.run(original, keyset, (tensor,), {})  # raises in a capture
        with on_the_cpu():
            return operator(alias(tensor))

    return kernel


def zeroing(original: Kernel, operator: Any) -> Kernel:
    """Return the kernel of ``zero_``, after which large memory is not committed."""

    def kernel(keyset: Any, tensor: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, tensor)
        may_be_stale = staleness.is_possible()
        result = operators.run(original, keyset, (tensor,), {}, OPERATOR)
        if graphs.is_capturing():
            with on_the_cpu():
                filled = alias(tensor)
            graphs.record(lambda seed: _fill_with_zeros(operator, filled), (), tensor)
            return result
        size = tensor.numel() * tensor.element_size()
        if size > _LARGE and tensor.is_contiguous():
            operators.library().zero(tensor.data_ptr(), size)
        else:
            with on_the_cpu():
                operator(alias(tensor))
        if may_be_stale:
            staleness.propagate((), tensor)
        return result

    return kernel


def _fill_with_zeros(operator: Any, tensor: torch.Tensor) -> None:
    with on_the_cpu():
        operator(tensor)
