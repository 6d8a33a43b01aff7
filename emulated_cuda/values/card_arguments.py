"""Arguments that mean something else on a card than on the CPU, and what the CPU's operator gets.

Torch's own CUDA operator runs first, so what a card refuses, such as ``driver="gelsd"`` of
``lstsq``, is refused in torch's words before this table is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emulated_cuda.values.operators import Kernel


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
    "torch.linalg.lstsq: None is 'gelsy' on the CPU and 'gels' on CUDA, where no other is valid",
)
_SINGULAR_VALUES = Argument(
    "driver",
    None,
    "torch.linalg.svd: it chooses a method of cuSOLVER and works on CUDA inputs only; the results "
    "of all methods are decompositions of the same matrix",
)
CARD_ARGUMENTS = {
    "aten::linalg_lstsq": _LEAST_SQUARES,
    "aten::linalg_lstsq.out": _LEAST_SQUARES,
    "aten::_linalg_svd": _SINGULAR_VALUES,
    "aten::_linalg_svd.U": _SINGULAR_VALUES,
}
"""Operator -> the argument that is another one on the CPU. Arguments that the CPU refuses, such as
``pivot=False`` of LU, are in :mod:`.equivalents`."""


def as_on_a_card(name: str, compute: Kernel) -> Kernel:
    """Return a function for the CPU that computes an operator as a card does."""
    argument = CARD_ARGUMENTS.get(name)
    if argument is None:
        return compute
    replaced = {argument.name: argument.on_cpu}
    return lambda *args, **kwargs: compute(*args, **{**kwargs, **replaced})
