"""Computes on the CPU what each operator on the emulated device would have computed.

Device memory is host memory. :mod:`.registration` puts a kernel of this package before torch's CUDA
kernel of every operator. It runs torch's kernel, which allocates as on a card and computes nothing,
and then the same operator on CPU tensors at the same addresses.

This module itself has these tensors, and writes results into them. A result is written into the
tensors that torch's CUDA operator returned. The CPU's operator may resize an ``out=`` argument, so
it gets a tensor of its own (`own_output`). Also here: which errors of the CPU a card would report
later, or not at all. What the device itself keeps, such as the constants of a kernel, is in memory
that no figure of a region counts: a card has it in its machine code.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import frombuffer  # at import, because a region counts what torch.frombuffer returns

from emulated_cuda import torch_private
from emulated_cuda.errors import DeviceAssertError
from emulated_cuda.torch_private import (
    compressed_parts,
    nested_from_parts,
    nested_parts,
    sparse_parts,
)
from emulated_cuda.torch_versions import ABOUT_VALUES, UNSUPPORTED


def uncounted(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor with the same strides, whose memory is not from torch's allocator."""
    source = tensor.untyped_storage()
    block = (ctypes.c_char * max(source.nbytes(), 1))()
    ctypes.memmove(block, source.data_ptr(), source.nbytes())
    storage = frombuffer(block, dtype=torch.uint8).untyped_storage()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    copied = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)
    hide_from_searches(copied, storage)
    return copied


def hide_from_searches(*kept: Any) -> None:
    """Let searches for live storages, such as those of the CPU meter, not find these."""
    for hidden in kept:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(hidden))


def tensors_at(addresses: Collection[int]) -> list[torch.Tensor] | None:
    """Return live tensors in whose storages the addresses lie; None if one is of no tensor.

    It looks at every object of the program, so it is slow.
    """
    missing, tensors = set(addresses) - {0}, []
    for value in gc.get_objects():
        if not missing:
            break
        if not issubclass(type(value), torch.Tensor):
            continue
        for address in list(missing):
            if _contains(value, address):
                missing.discard(address)
                tensors.append(value)
    return None if missing else tensors


def _contains(tensor: torch.Tensor, address: int) -> bool:
    try:
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        return start <= address < start + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # it has no memory, such as a fake one
        return False


# One CPU storage covers every address of the process. An alias is a view of it, which takes one
# call to create; a storage of its own would take three, and aliases of one storage overlap as far
# as torch's checks for overlapping arguments can see.
_FIRST = 4096
_SIZE = 2**47 - 2 * _FIRST
_memory: dict[torch.dtype, torch.Tensor] = {}


def _memory_of(dtype: torch.dtype) -> torch.Tensor:
    """Return all addresses as elements of a type."""
    if not _memory:
        every_byte = (ctypes.c_char * _SIZE).from_address(_FIRST)
        _memory[torch.uint8] = frombuffer(every_byte, dtype=torch.uint8)
    memory = _memory.get(dtype)
    if memory is None:
        storage = _memory[torch.uint8].untyped_storage()
        memory = torch.empty(0, dtype=dtype)
        memory.set_(storage, 0, (_SIZE // memory.element_size(),), (1,))
        _memory[dtype] = memory
        hide_from_searches(memory, storage, _memory[torch.uint8])
    return memory


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the memory, shape and strides of a strided tensor on the device."""
    if not tensor.is_cuda:
        return tensor
    dtype = tensor.dtype
    memory = _memory.get(dtype)
    if memory is None:
        if tensor.is_quantized:
            return _quantized_alias(tensor)
        memory = _memory_of(dtype)
    distance = (tensor.data_ptr() or _first_if_empty(tensor)) - _FIRST
    index, odd = divmod(distance, tensor.element_size())
    if odd:
        return _with_own_storage(tensor)
    # size(), because subclasses may redefine shape: that of a lazy parameter raises.
    result = torch.as_strided(memory, tensor.size(), tensor.stride(), index)
    if tensor.is_neg():
        result = torch_private.negated(result)
    if tensor.is_conj():
        result = torch_private.conjugated(result)
    return result


def _first_if_empty(tensor: torch.Tensor) -> int:
    """Return an address for a tensor that has none: without elements nothing is read there."""
    if tensor.numel():
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory, because its storage was "
            "resized to 0 bytes; on a card this is an illegal memory access. Resize its storage "
            "before you use the tensor"
        )
    return _FIRST


def own_output(value: Any) -> Any:
    """Return an ``out`` argument of an operator as CPU tensors that the operator may resize.

    They are equal to those on the device, because an operator may leave elements as they are. An
    alias can be given other strides or a larger size without an error, because its storage has
    every address; the operator would then write to memory of others.
    """
    if isinstance(value, (list, tuple)):
        return [own_output(item) for item in value]
    return on_cpu(value).clone() if isinstance(value, torch.Tensor) else value


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of any address, whose storage ends where the tensor does."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((length - 1) * stride for length, stride in steps)
    if tensor.numel() == 0:
        elements = 0
    size = elements * tensor.element_size()
    block = (ctypes.c_char * max(size, 1)).from_address(tensor.data_ptr() or _FIRST)
    storage = frombuffer(block, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def _quantized_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias with a copy of the scales and zero points."""
    empty = torch_private.empty_quantized_like(tensor, alias)
    start = (tensor.data_ptr() or _FIRST) - _FIRST
    storage = _memory_of(torch.uint8).untyped_storage()
    return empty.set_(storage, start // tensor.element_size(), tensor.size(), tensor.stride())


def nested_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a nested CPU tensor in the strided layout with the memory of one on the device."""
    values, shape = torch_private.nested_parts(tensor)
    # Operators on nested tensors use the whole storage as the buffer.
    return torch_private.nested_from_parts(_with_own_storage(values), shape)


def sparse_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse CPU tensor whose parts share the memory of a device tensor's parts."""
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        indices, values = map(alias, torch_private.sparse_parts(tensor))
        coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=False, is_coalesced=coalesced
        )
    outer, inner = torch_private.compressed_parts(tensor)
    return torch.sparse_compressed_tensor(
        *(alias(outer), alias(inner), alias(tensor.values()), shape),
        layout=tensor.layout,
        check_invariants=False,
    )


def on_cpu(value: Any) -> Any:
    """Return an argument of an operator with CPU aliases in place of tensors on the device."""
    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            return value
        if value.layout is not torch.strided:
            return sparse_alias(value)
        return nested_alias(value) if value.is_nested else alias(value)
    if isinstance(value, (list, tuple)):
        return [on_cpu(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return value


def is_unsupported(error: Exception) -> bool:
    """Whether the CPU has no such operator for these types, though a card has."""
    if isinstance(error, NotImplementedError):
        return True
    return not isinstance(error, IndexError) and bool(UNSUPPORTED.value.search(str(error)))


def is_assert(error: Exception) -> bool:
    """Whether an error is about a value, which a kernel would have refused."""
    return isinstance(error, IndexError) or bool(ABOUT_VALUES.value.search(str(error)))


def device_assert(operator: str, error: Exception) -> DeviceAssertError:
    """Return the error for a value that a kernel would have refused."""
    why = str(error).rstrip(".")
    return DeviceAssertError(
        f"{operator}: {why}. On a card this is a device-side assert, which is reported at the "
        "next synchronization; every later call fails, too"
    )


@dataclass(frozen=True)
class Everywhere:
    """A number that every element of a result gets, whatever its shape."""

    number: int


@dataclass(frozen=True)
class Fitted:
    """A result that the device may return in a padded, flattened or empty form."""

    tensor: torch.Tensor | None


class FormError(RuntimeError):
    """The form of the result depends on values: how many elements a sparse one has, for example."""


class ShapeError(RuntimeError):
    """The CPU's result has another shape than that of the operator on the device."""


def write(results: Any, computed: Any) -> list[torch.Tensor]:
    """Copy computed tensors into results of the same structure; return those without a value.

    Raises:
        ShapeError: if their shapes differ.
        FormError: if they are sparse, or quantized with a scale that depends on values.
    """
    if isinstance(results, torch.Tensor):
        return [] if _is_written(results, computed) or not results.numel() else [results]
    unwritten = []
    if isinstance(results, (list, tuple)):
        values = computed if isinstance(computed, (list, tuple)) else [computed]
        for index, result in enumerate(results):
            unwritten += write(result, values[index] if index < len(values) else None)
    return unwritten


def _is_written(result: torch.Tensor, computed: Any) -> bool:
    """Write one result; return whether there was a value for it."""
    if isinstance(computed, torch.Tensor):
        return _write_tensor(result, computed)
    if isinstance(computed, Everywhere):
        alias(result).fill_(computed.number)
        return True
    if isinstance(computed, Fitted) and computed.tensor is not None:
        _write_fitted(alias(result), computed.tensor)
        return True
    return False


def plain(computed: Any) -> Any:
    """Return computed values as plain tensors, for results that the device did not allocate."""
    if isinstance(computed, Everywhere):
        return torch.tensor(computed.number)
    if isinstance(computed, Fitted):
        return computed.tensor
    if isinstance(computed, (list, tuple)):
        return type(computed)([plain(value) for value in computed])
    return computed


def _write_fitted(target: torch.Tensor, computed: torch.Tensor) -> None:
    if target.numel() == computed.numel():
        target.copy_(computed.reshape(target.shape))
    elif target.numel() and target.dim() == computed.dim():
        for axis, length in enumerate(computed.shape):
            target = target.narrow(axis, 0, min(length, target.shape[axis]))
        places = (*map(slice, target.shape),)
        target.copy_(computed[places])


def _write_tensor(result: torch.Tensor, computed: torch.Tensor) -> bool:
    if result.layout is not torch.strided:
        raise FormError
    if result.is_nested:
        return _write_nested(result, computed)
    if result.shape != computed.shape:
        if result.numel() == 0 or computed.numel() == 0:
            # Either device may leave a result out. If the CPU did, there is no value to write.
            return result.numel() == 0
        raise ShapeError(
            f"the operator returns shape {tuple(computed.shape)} on the CPU, but "
            f"{tuple(result.shape)} on the emulated device"
        )
    if result.is_quantized:
        return _write_quantized(result, computed)
    target = alias(result)
    if target.data_ptr() != computed.data_ptr() or target.stride() != computed.stride():
        target.copy_(computed)
    return True


def _write_quantized(result: torch.Tensor, computed: torch.Tensor) -> bool:
    if result.qscheme() is torch.per_channel_affine:
        alias(result.q_per_channel_scales()).copy_(computed.q_per_channel_scales())
        alias(result.q_per_channel_zero_points()).copy_(computed.q_per_channel_zero_points())
    elif (result.q_scale(), result.q_zero_point()) != (computed.q_scale(), computed.q_zero_point()):
        raise FormError
    alias(result).copy_(computed)
    return True


def _write_nested(result: torch.Tensor, computed: torch.Tensor) -> bool:
    parts = nested_alias(result).unbind(), computed.unbind()
    if [part.shape for part in parts[0]] != [part.shape for part in parts[1]]:
        raise ShapeError(
            "the operator returns a nested tensor whose parts have different shapes on the CPU "
            "than on the emulated device"
        )
    for target, part in zip(*parts, strict=True):
        target.copy_(part)
    return True


def upload(value: Any, device: torch.device) -> Any:
    """Return a computed result in memory that torch's allocator gives on the device."""
    value = plain(value)
    if isinstance(value, torch.Tensor):
        return upload_tensor(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)([upload(item, device) for item in value])
    return value


def upload_tensor(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return one tensor on the device."""
    if value.is_quantized:
        return value.to(device)
    if value.is_nested:
        values, parts = nested_parts(value)
        return nested_from_parts(upload_tensor(values, device), parts)
    if value.layout is torch.sparse_coo:
        indices, values = (upload_tensor(part, device) for part in sparse_parts(value))
        return torch.sparse_coo_tensor(
            *(indices, values, tuple(value.shape)),
            check_invariants=False,
            is_coalesced=value.is_coalesced(),
        )
    if value.layout is not torch.strided:
        outer, inner = compressed_parts(value)
        return torch.sparse_compressed_tensor(
            upload_tensor(outer, device),
            upload_tensor(inner, device),
            upload_tensor(value.values(), device),
            tuple(value.shape),
            layout=value.layout,
            check_invariants=False,
        )
    shape, stride = value.shape, value.stride()
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
    alias(result).copy_(value)
    return result


def replace(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give an ``out=`` argument the shape and the values of a computed result."""
    if target.shape != value.shape:
        target.resize_(value.shape)
    alias(target).copy_(value)
