"""CPU forms of operators that only CUDA has, or that return more on CUDA.

Each function gets CPU aliases of the operator's arguments and returns what it would have written.
The comment before each function names the source of its formula.
"""

from collections.abc import Callable
from typing import Any

from pytest_cka_memory.emulated.values.equivalents import (
    attention,
    attention_sequences,
    convolution,
    normalization,
    others,
    recurrent,
    sampling,
)

EQUIVALENTS: dict[str, Callable[..., Any]] = {
    **attention.EQUIVALENTS,
    **attention_sequences.EQUIVALENTS,
    **convolution.EQUIVALENTS,
    **others.EQUIVALENTS,
    **normalization.EQUIVALENTS,
    **recurrent.EQUIVALENTS,
    **sampling.EQUIVALENTS,
}
"""Name of an operator -> the function that computes it."""
