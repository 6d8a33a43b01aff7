"""The weights of quantized modules, which C++ keeps packed in an object of TorchScript.

A module has it as an attribute, ``module._packed_params``, and its ``unpack()`` returns the weight
and the bias. What a library keeps in its own layout beside them belongs to no tensor of Python.
"""

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_cka_memory.holders.tree import Reference
from pytest_cka_memory.meters import torch_keepers, torch_private

_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
ADVICE = (
    "a quantized module keeps its weight and bias packed in C++, in its attribute _packed_params: "
    "delete the module, and each container or hook that references it"
)
POSSIBLE = (
    "the packed parameters of a quantized module (its attribute _packed_params; they are freed "
    "with the module)"
)


def unpacked(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that packed parameters keep as they are.

    Unpacking copies the others, and such a copy is dropped here.
    """
    for index, tensor in enumerate(torch_keepers.packed_tensors(value)):
        if tensor is not None and torch_private.use_count(tensor) > 1:
            yield f".unpack()[{index}]", tensor


def leads_through(path: Sequence[Reference]) -> bool:
    """Whether a path leads through packed parameters."""
    return any((step.text or "").startswith(".unpack()") for step in path)


@functools.cache
def are_live() -> bool:
    """Whether a quantized module exists; it is asked for each storage, and looks at all objects.

    What is known is forgotten with ``are_live.cache_clear()`` at the end of a search.
    """
    names = map(_module_of, set(map(type, gc.get_objects())))
    return any(type(name) is str and name.startswith(_MODULES) for name in names)


def _module_of(kind: type) -> Any:
    return type.__dict__["__module__"].__get__(kind)
