"""References of objects of C++ that contain tensors: futures, TorchScript, DLPack capsules."""

import ctypes
from collections.abc import Collection, Iterator
from typing import Any

from pytest_cka_memory.holders import packed_parameters, script_plans
from pytest_cka_memory.holders.search import RulesForType, TypeRules

_DATA_AT = {b"dltensor": 0, b"dltensor_versioned": 32}
"""Name of a DLPack capsule -> where the address of the data is in what it points to.

Source: ``dlpack.h`` 1.0, ``DLManagedTensor`` and ``DLManagedTensorVersioned`` with 8-byte pointers.
"""


def cpp_rules() -> RulesForType:
    """Return the rules for the types of such objects; None for others."""
    import torch

    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.objects import with_subclasses

    futures = with_subclasses(torch.futures.Future)
    script = {*with_subclasses(torch.jit.ScriptModule), *torch_private.SCRIPT_TYPES}

    def rules_for(kind: type) -> TypeRules | None:
        if kind in futures:
            return TypeRules(extra_references=_result_of_future)
        if kind in script:
            return TypeRules(extra_references=_references_of_script)
        if kind is torch.ScriptObject:
            return TypeRules(extra_references=packed_parameters.unpacked)
        if type(kind) is type and kind.__name__ == "PyCapsule":
            return TypeRules(_keys_of_capsule)
        return None

    return rules_for


def _references_of_script(value: Any) -> Iterator[tuple[str, Any]]:
    from pytest_cka_memory.meters import torch_keepers

    yield from torch_keepers.script_references(value)
    yield from script_plans.constants(value)


def _result_of_future(future: Any) -> Iterator[tuple[str, Any]]:
    if future.done():
        try:
            yield ".value()", future.value()
        except Exception:  # it has an error instead of a value, which may be any exception
            return


def _keys_of_capsule(capsule: Any) -> Collection[int]:
    """Return the address of the tensor in a capsule of DLPack that nobody has used yet."""
    name = _name_of_capsule(capsule)
    if name not in _DATA_AT:
        return ()
    managed = _pointer_in_capsule(capsule, name)
    address = ctypes.c_void_p.from_address(managed + _DATA_AT[name]).value if managed else None
    return () if address is None else (address,)


_name_of_capsule: Any = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_in_capsule: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
