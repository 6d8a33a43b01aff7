"""Copies, also to and from the host, reads of single numbers, and filling with zeros."""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda.values import graphs, operators, staleness
from emulated_cuda.values.aliases import alias
from emulated_cuda.values.computing import on_the_cpu
from emulated_cuda.values.operators import (
    COPY,
    OPERATOR,
    OUTSIDE,
    Kernel,
    is_argument_of_running,
    thread,
)

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
