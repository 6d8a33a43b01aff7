"""CPU forms of operators that only CUDA has, or that return more on CUDA.

Each function gets CPU aliases of the operator's arguments, under their names in its schema, and
returns what the operator would have written. :func:`.table.equivalent` enters it into the table and
names the source of its formula.
"""

from emulated_cuda.values.equivalents import (
    attention,
    attention_sequences,
    normalization,
    others,
    products,
    recurrent,
)
from emulated_cuda.values.equivalents.table import EQUIVALENTS, by_name

__all__ = [
    "EQUIVALENTS",
    "attention",
    "attention_sequences",
    "by_name",
    "normalization",
    "others",
    "products",
    "recurrent",
]
