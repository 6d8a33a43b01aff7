"""Programs that misuse tensors and the runtime; ``test_hostile_programs.py`` runs them.

A function of `ON_BOTH` takes a device. It runs on the CPU and on the emulated one, and must raise
on both, or give the same on both. One of `ON_CARD` asserts what it expects. None may end the
process, also if the emulated device is compiled with AddressSanitizer.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

import emulated_cuda

HUGE = 2**62
Program = Callable[[str], Any]


def ones(*shape: int, d: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=d, dtype=dtype)


def count(n: int, d: str) -> torch.Tensor:
    return torch.arange(n, device=d, dtype=torch.float32)


def index(*values: int, d: str) -> torch.Tensor:
    return torch.tensor(values, device=d)


def resized(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Resize, and fill what is new, which is not initialized."""
    old = x.numel()
    x.resize_(shape).flatten()[old:] = 7
    return x


def set_to(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.set_(x.untyped_storage(), *args)


def grown_storage(d: str) -> Any:
    x = count(4, d)
    x.untyped_storage().resize_(4096)
    return x.sum(), x.as_strided((4,), (1,)) + 1


def view_of_deleted(d: str) -> Any:
    x = count(100, d)
    y = x[50:]
    del x
    gc.collect()
    return y + count(50, d)


def view_after_base_resized(d: str) -> Any:
    x = count(8, d)
    y = x[4:]
    x.resize_(1000)
    x[:8].zero_()
    return y.clone()


def data_swapped(d: str) -> Any:
    x, y = count(10, d), count(20, d)
    x.data = y
    y.resize_(0)
    return x.sum()


def storage_in_two_types(d: str) -> Any:
    x = count(4, d)
    y = torch.empty(0, dtype=torch.int32, device=d).set_(x.untyped_storage(), 0, (4,), (1,))
    y.fill_(0)
    return x + 1


def overlapping_write(d: str) -> Any:
    return count(4, d).expand(3, 4).add_(1)


def overlapping_copy(d: str) -> Any:
    x = count(10, d)
    return x[1:].copy_(x[:-1].clone())


def dlpack_round_trips(d: str) -> Any:
    x = count(10, d)
    for _ in range(50):
        x = torch.from_dlpack(x)
    return x + 1


def dlpack_twice(d: str) -> Any:
    capsule = torch.utils.dlpack.to_dlpack(count(3, d))
    torch.utils.dlpack.from_dlpack(capsule)
    return torch.utils.dlpack.from_dlpack(capsule)


def dlpack_unused(d: str) -> Any:
    torch.utils.dlpack.to_dlpack(count(3, d))
    gc.collect()
    return torch.ones(1)


def dlpack_of_deleted(d: str) -> Any:
    capsule = torch.utils.dlpack.to_dlpack(count(1000, d)[500:])
    gc.collect()
    return torch.utils.dlpack.from_dlpack(capsule).sum()


def backward_after_in_place(d: str) -> Any:
    x = ones(3, d=d).requires_grad_()
    y = x.exp()
    y.add_(1)
    y.sum().backward()
    return x.grad


def backward_twice(d: str) -> Any:
    y = ones(3, d=d).requires_grad_().exp().sum()
    y.backward()
    y.backward()


def hook_that_resizes(d: str) -> Any:
    x = ones(3, d=d).requires_grad_()
    y = x * 2
    y.register_hook(lambda gradient: gradient.new_ones(7))
    y.sum().backward()
    return x.grad


def freed_in_backward(d: str) -> Any:
    x = ones(64, d=d).requires_grad_()
    y = (x * x).exp()
    y.register_hook(lambda gradient: x.data.untyped_storage().resize_(0) and gradient)
    y.sum().backward()
    return x.grad


def threads_that_share(d: str) -> Any:
    x = torch.zeros(1000, device=d)
    parts = [threading.Thread(target=part.add_, args=(1,)) for part in x.chunk(8)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    return x


def state_of_wrong_shape(d: str) -> Any:
    torch.nn.Linear(3, 4, device=d).load_state_dict({"weight": ones(5, 5, d=d)})


def sparse_grown_in_place(d: str) -> Any:
    """The CPU's operator gives the parts of the first tensor another size."""
    x = torch.eye(3, device=d).to_sparse()
    x.zero_()
    x.add_(torch.ones(3, 3, device=d).to_sparse())
    y = torch.eye(3, device=d).to_sparse()
    y.add_(torch.ones(3, 3, device=d).to_sparse(), alpha=2)
    return x.to_dense(), y.to_dense(), y._nnz() >= 9


def sparse_gradient_added_to_zeros(d: str) -> Any:
    layer = torch.nn.Embedding.from_pretrained(count(12, d).view(4, 3), freeze=False, sparse=True)
    layer(index(0, 1, 2, d=d)).sum().backward()
    assert layer.weight.grad is not None
    layer.weight.grad.zero_()
    layer(index(0, 1, 2, 2, d=d)).sum().backward()
    return layer.weight.grad.to_dense()


ON_BOTH: dict[str, Program] = {
    "index_beyond": lambda d: count(4, d)[index(9, d=d)],
    "index_below": lambda d: count(4, d)[index(-9, d=d)],
    "index_huge": lambda d: count(4, d)[index(HUGE, d=d)],
    "index_put_beyond": lambda d: count(4, d).index_put_((index(7, d=d),), ones(1, d=d)),
    "index_select_beyond": lambda d: count(4, d).index_select(0, index(4, d=d)),
    "index_add_beyond": lambda d: count(4, d).index_add_(0, index(4, d=d), ones(1, d=d)),
    "index_copy_beyond": lambda d: count(4, d).index_copy_(0, index(4, d=d), ones(1, d=d)),
    "index_fill_beyond": lambda d: count(4, d).index_fill_(0, index(99, d=d), 1.0),
    "gather_beyond": lambda d: count(4, d).gather(0, index(5, d=d)),
    "scatter_beyond": lambda d: count(4, d).scatter_(0, index(5, d=d), 1.0),
    "scatter_add_below": lambda d: count(4, d).scatter_add_(0, index(-5, d=d), ones(1, d=d)),
    "take_beyond": lambda d: count(4, d).take(index(4, d=d)),
    "put_beyond": lambda d: count(4, d).put_(index(4, d=d), ones(1, d=d)),
    "embedding_beyond": lambda d: F.embedding(index(5, d=d), ones(5, 2, d=d)),
    "embedding_bag_beyond": lambda d: F.embedding_bag(
        index(5, d=d), ones(5, 2, d=d), index(0, d=d)
    ),
    "embedding_bag_offsets": lambda d: F.embedding_bag(
        index(1, d=d), ones(5, 2, d=d), index(9, d=d)
    ),
    "cross_entropy_beyond": lambda d: F.cross_entropy(ones(1, 3, d=d), index(3, d=d)),
    "nll_loss_below": lambda d: F.nll_loss(ones(1, 3, d=d), index(-2, d=d)),
    "one_hot_below": lambda d: F.one_hot(index(-1, d=d)),
    "one_hot_beyond": lambda d: F.one_hot(index(5, d=d), 3),
    "bincount_below": lambda d: torch.bincount(index(-1, d=d)),
    "max_unpool_beyond": lambda d: F.max_unpool1d(
        ones(1, 1, 1, d=d), index(9, d=d).view(1, 1, 1), 2
    ),
    "repeat_interleave_below": lambda d: torch.repeat_interleave(index(-1, d=d)),
    "multinomial_of_nan": lambda d: torch.multinomial(ones(3, d=d) * float("nan"), 1),
    "bernoulli_beyond": lambda d: torch.bernoulli(ones(3, d=d) * 5),
    "split_too_much": lambda d: count(4, d).split([3, 3]),
    "narrow_beyond": lambda d: count(4, d).narrow(0, 3, 5),
    "select_beyond": lambda d: count(4, d).select(0, 4),
    "view_of_wrong_size": lambda d: count(4, d).view(3),
    "view_of_type_misaligned": lambda d: count(4, d)[1:].view(torch.float64),
    "unfold_beyond": lambda d: count(4, d).unfold(0, 5, 1),
    "as_strided_beyond": lambda d: count(4, d).as_strided((9,), (1,)),
    "as_strided_far": lambda d: count(4, d).as_strided((2,), (HUGE,)),
    "as_strided_offset": lambda d: count(4, d).as_strided((1,), (1,), HUGE),
    "as_strided_below": lambda d: count(4, d).as_strided((2,), (-1,)),
    "as_strided_overlaps": lambda d: count(4, d).as_strided((4, 3), (0, 1)) + 1,
    "as_strided_scatter_beyond": lambda d: count(4, d).as_strided_scatter(ones(9, d=d), (9,), (1,)),
    "set_beyond": lambda d: set_to(count(4, d), 0, (1000,), (1,)).fill_(3),
    "set_offset_beyond": lambda d: set_to(count(4, d), 100, (4,), (1,)).fill_(3),
    "set_below": lambda d: set_to(count(4, d), -1, (4,), (1,)),
    "set_other_device": lambda d: count(4, d).set_(torch.ones(4, device="meta")),
    "set_to_nothing": lambda d: count(4, d).set_().sum(),
    "set_of_other_type": lambda d: count(4, d).set_(torch.zeros(4, dtype=torch.int64, device=d)),
    "resize_grows": lambda d: resized(count(4, d), 1000),
    "resize_shrinks": lambda d: count(1000, d).resize_(2) + 1,
    "resize_and_back": lambda d: count(100, d).resize_(1).resize_(100) + 1,
    "resize_huge": lambda d: count(4, d).resize_(HUGE),
    "resize_below": lambda d: count(4, d).resize_(-1),
    "resize_of_required": lambda d: count(4, d).requires_grad_().resize_(9),
    "resize_of_view": lambda d: resized(count(8, d)[:4], 16)[:4],
    "storage_grows": grown_storage,
    "sparse_grows_in_place": sparse_grown_in_place,
    "sparse_gradient_added_to_zeros": sparse_gradient_added_to_zeros,
    "storage_beyond": lambda d: count(4, d).untyped_storage()[100],
    "storage_slice_of_deleted": lambda d: torch.tensor(count(4, d).untyped_storage().tolist()),
    "view_of_deleted": view_of_deleted,
    "view_after_base_resized": view_after_base_resized,
    "data_swapped": data_swapped,
    "storage_in_two_types": storage_in_two_types,
    "overlapping_write": overlapping_write,
    "overlapping_copy": overlapping_copy,
    "out_too_small": lambda d: torch.add(count(9, d), 1, out=torch.empty(0, device=d)),
    "out_too_large": lambda d: torch.add(count(4, d), 1, out=torch.empty(0, 9, device=d)),
    "out_of_wrong_type": lambda d: torch.add(
        count(4, d), 0.5, out=torch.empty(4, dtype=torch.int64, device=d)
    ),
    "out_is_a_view": lambda d: torch.add(count(4, d), 1, out=torch.zeros(9, device=d)[::2][:4]),
    "out_is_the_input": lambda d: (lambda x: torch.mul(x, x, out=x))(count(4, d)),
    "out_overlaps_input": lambda d: (lambda x: torch.add(x[:-1], 1, out=x[1:]))(count(9, d)),
    "out_expanded": lambda d: torch.add(count(4, d), 1, out=torch.zeros(1, device=d).expand(4)),
    "out_on_meta": lambda d: torch.add(count(4, d), 1, out=torch.empty(4, device="meta")),
    "out_of_matmul": lambda d: torch.mm(
        ones(3, 4, d=d), ones(4, 5, d=d), out=torch.empty(0, device=d)
    ),
    "out_of_cat_is_its_input": lambda d: (lambda x: torch.cat([x, x], out=x))(count(4, d)),
    "out_of_sort": lambda d: torch.sort(
        count(9, d), out=(torch.empty(0, device=d), torch.empty(0, dtype=torch.int64, device=d))
    ),
    "out_of_nonzero": lambda d: torch.nonzero(
        count(9, d), out=torch.empty(0, dtype=torch.int64, device=d)
    ),
    "matmul_of_wrong_sizes": lambda d: ones(3, 4, d=d) @ ones(3, 4, d=d),
    "matmul_of_nothing": lambda d: ones(3, 0, d=d) @ ones(0, 4, d=d),
    "matmul_of_expanded": lambda d: ones(1, d=d).expand(64, 64) @ count(64, d).expand(64, 64),
    "matmul_of_types": lambda d: ones(2, 2, d=d) @ ones(2, 2, d=d, dtype=torch.float64),
    "bmm_of_wrong_sizes": lambda d: torch.bmm(ones(2, 3, 4, d=d), ones(3, 4, 5, d=d)),
    "convolution_of_wrong_sizes": lambda d: F.conv2d(ones(1, 3, 8, 8, d=d), ones(4, 2, 3, 3, d=d)),
    "convolution_too_small": lambda d: F.conv2d(ones(1, 3, 2, 2, d=d), ones(4, 3, 5, 5, d=d)),
    "convolution_of_nothing": lambda d: F.conv2d(ones(0, 3, 8, 8, d=d), ones(4, 3, 3, 3, d=d)),
    "pool_too_large": lambda d: F.max_pool2d(ones(1, 1, 2, 2, d=d), 5),
    "batch_norm_of_wrong_sizes": lambda d: F.batch_norm(
        ones(2, 3, d=d), ones(4, d=d), ones(4, d=d), training=True
    ),
    "layer_norm_of_wrong_sizes": lambda d: F.layer_norm(ones(2, 3, d=d), (4,)),
    "empty_below": lambda d: torch.empty(-1, device=d),
    "empty_huge": lambda d: torch.empty(HUGE, device=d),
    "empty_overflows": lambda d: torch.empty(2**40, 2**40, device=d),
    "empty_strided_below": lambda d: torch.empty_strided((2, 2), (-1, 1), device=d),
    "empty_strided_huge": lambda d: torch.empty_strided((2, 2), (HUGE, 1), device=d),
    "arange_endless": lambda d: torch.arange(0, float("inf"), device=d),
    "linspace_below": lambda d: torch.linspace(0, 1, -1, device=d),
    "expand_below": lambda d: count(4, d).expand(-2, 4),
    "repeat_huge": lambda d: count(4, d).repeat(HUGE),
    "cat_of_types": lambda d: torch.cat([count(2, d), index(5, d=d)]),
    "cat_of_wrong_sizes": lambda d: torch.cat([ones(2, 2, d=d), ones(3, 3, d=d)]),
    "stack_of_nothing": lambda d: torch.stack([]),
    "reduce_nothing": lambda d: torch.empty(0, device=d).max(),
    "sum_of_nothing": lambda d: torch.empty(0, device=d).sum(),
    "sort_of_nan": lambda d: (count(4, d) / 0 * 0).sort()[1].sum(),
    "item_of_many": lambda d: count(4, d).item(),
    "copy_of_wrong_size": lambda d: count(4, d).copy_(count(5, d)),
    "copy_to_expanded": lambda d: torch.zeros(1, device=d).expand(4).copy_(count(4, d)),
    "copy_from_meta": lambda d: count(4, d).copy_(torch.empty(4, device="meta")),
    "numpy_of_required": lambda d: count(4, d).requires_grad_().cpu().numpy(),
    "from_buffer_too_small": lambda d: torch.frombuffer(
        bytearray(8), dtype=torch.float32, count=9
    ).to(d),
    "dlpack_round_trips": dlpack_round_trips,
    "dlpack_twice": dlpack_twice,
    "dlpack_unused": dlpack_unused,
    "dlpack_of_deleted": dlpack_of_deleted,
    "dlpack_of_required": lambda d: torch.from_dlpack(count(4, d).requires_grad_()),
    "dlpack_of_conjugate": lambda d: torch.from_dlpack(ones(2, d=d, dtype=torch.complex64).conj()),
    "backward_after_in_place": backward_after_in_place,
    "backward_twice": backward_twice,
    "hook_that_resizes": hook_that_resizes,
    "threads_that_share": threads_that_share,
    "state_of_wrong_shape": state_of_wrong_shape,
    "sparse_indices_beyond": lambda d: torch.sparse_coo_tensor(
        index(9, d=d).view(1, 1), ones(1, d=d), (4,), device=d, check_invariants=True
    ),
    "sparse_indices_unchecked": lambda d: torch.sparse_coo_tensor(
        index(1, d=d).view(1, 1), ones(1, d=d), (4,), device=d
    ).to_dense(),
    "packed_lengths_wrong": lambda d: torch.nn.utils.rnn.pack_padded_sequence(
        ones(2, 3, 1, d=d), torch.tensor([9, 1])
    ),
    "roll_huge": lambda d: count(4, d).roll(HUGE),
    "diag_far": lambda d: ones(3, 3, d=d).diagonal(HUGE),
    "fft_below": lambda d: torch.fft.fft(count(4, d), n=-5),
    "foreach_of_wrong_sizes": lambda d: torch._foreach_add([count(3, d)], [count(4, d)]),
    "where_of_wrong_sizes": lambda d: torch.where(count(3, d) > 0, count(4, d), count(5, d)),
    "masked_select_of_wrong_size": lambda d: count(4, d)[count(5, d) > 0],
    "masked_scatter_too_few": lambda d: count(4, d).masked_scatter_(
        torch.ones(4, dtype=torch.bool, device=d), count(2, d)
    ),
}


# ---- The runtime, called as C code calls it ----


def runtime() -> ctypes.CDLL:
    spec = find_spec("emulated_cuda._cuda")
    assert spec is not None
    assert spec.origin is not None
    return ctypes.CDLL(spec.origin)


def allocated(size: int = 64, function: str = "cudaMalloc") -> ctypes.c_void_p:
    pointer = ctypes.c_void_p()
    assert getattr(runtime(), function)(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    return pointer


def created(function: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    assert getattr(runtime(), function)(ctypes.byref(handle)) == 0
    return handle


def code(function: str, *args: Any) -> int:
    result: int = getattr(runtime(), function)(*args)
    runtime().cudaGetLastError()
    return result


SIZE = ctypes.c_size_t
GARBAGE = ctypes.c_void_p(0xD000)
"""In the first 64 KiB, where Linux maps nothing. The heap of Debian's Python, which is loaded at a
fixed low address, reaches beyond most other small numbers."""
INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_REGISTERED = 1, 2, 400, 713


def free_twice() -> None:
    pointer = allocated()
    assert [code("cudaFree", pointer) for _ in range(2)] == [0, INVALID_VALUE]


def free_inside() -> None:
    pointer = allocated(4096)
    inside = ctypes.c_void_p((pointer.value or 0) + 64)
    assert [code("cudaFree", inside), code("cudaFree", pointer)] == [INVALID_VALUE, 0]


def free_of_tensor() -> None:
    """The second free, which torch makes when it empties its cache, must not harm it."""
    x = torch.ones(30 * 2**20, dtype=torch.uint8, device="cuda")
    assert code("cudaFree", ctypes.c_void_p(x.data_ptr() + 512)) == INVALID_VALUE
    assert int(x[-1]) == 1


def free_garbage() -> None:
    assert code("cudaFree", GARBAGE) == INVALID_VALUE
    assert code("cudaFree", None) == 0
    assert code("cudaFreeAsync", GARBAGE, None) == INVALID_VALUE


def malloc_huge() -> None:
    pointer = ctypes.c_void_p(1)
    for function in ("cudaMalloc", "cudaMallocHost"):
        for size in (2**47, 2**63, 2**64 - 1):
            assert code(function, ctypes.byref(pointer), SIZE(size)) == OUT_OF_MEMORY, (
                function,
                size,
            )
    for size in (2**47, 2**63, 2**64 - 1):
        assert code("cudaMallocAsync", ctypes.byref(pointer), SIZE(size), None) == OUT_OF_MEMORY


def malloc_nothing() -> None:
    pointer = ctypes.c_void_p(1)
    assert code("cudaMalloc", ctypes.byref(pointer), SIZE(0)) == 0
    assert pointer.value is None


def free_host_twice() -> None:
    pointer = allocated(function="cudaMallocHost")
    assert [code("cudaFreeHost", pointer) for _ in range(2)] == [0, INVALID_VALUE]


def free_host_of_others() -> None:
    text = ctypes.create_string_buffer(64)
    for pointer in (GARBAGE, ctypes.cast(text, ctypes.c_void_p), allocated()):
        assert code("cudaFreeHost", pointer) == INVALID_VALUE
    assert code("cudaFreeHost", None) == 0


def free_host_of_registered() -> None:
    text = ctypes.create_string_buffer(8192)
    assert code("cudaHostRegister", text, SIZE(8192), 0) == 0
    assert code("cudaFreeHost", text) == INVALID_VALUE
    assert [code("cudaHostUnregister", text) for _ in range(2)] == [0, NOT_REGISTERED]


def register_garbage() -> None:
    for pointer, size in ((None, 64), (GARBAGE, 4096), (ctypes.create_string_buffer(8), 0)):
        assert code("cudaHostRegister", pointer, SIZE(size), 0) == INVALID_VALUE
    assert code("cudaHostRegister", ctypes.create_string_buffer(8), SIZE(2**63), 0) == INVALID_VALUE
    assert code("cudaHostUnregister", GARBAGE) == NOT_REGISTERED


def pinned_tensors() -> None:
    empty = torch.empty(0, pin_memory=True)
    x = torch.arange(1000.0).pin_memory()
    y = x[500:]
    del x
    gc.collect()
    assert float(y.cuda(non_blocking=True)[0]) == 500
    assert empty.cuda().numel() == 0
    for size in (-1, HUGE):
        try:
            torch.empty(size, pin_memory=True)
        except RuntimeError:
            continue
        raise AssertionError(size)


def pinned_freed_in_use() -> None:
    for _ in range(20):
        x = torch.ones(10000).pin_memory()
        y = x.to("cuda", non_blocking=True)
        del x
        assert float(y.sum()) == 10000
    torch._C._host_emptyCache() if hasattr(torch._C, "_host_emptyCache") else None


def stream_destroyed_twice() -> None:
    stream = created("cudaStreamCreate")
    assert [code("cudaStreamDestroy", stream) for _ in range(2)] == [0, INVALID_HANDLE]
    assert code("cudaStreamGetPriority", stream, ctypes.byref(ctypes.c_int())) == INVALID_HANDLE


def stream_destroyed_in_use() -> None:
    stream = created("cudaStreamCreate")
    event = created("cudaEventCreate")
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.value or 0)):
        x = torch.ones(1000, device="cuda") * 2
        assert code("cudaEventRecord", event, stream) == 0
        assert code("cudaStreamDestroy", stream) == 0
        assert float((x + 1).sum()) == 3000
    assert code("cudaEventSynchronize", event) == 0
    assert code("cudaStreamWaitEvent", None, event, 0) == 0
    assert code("cudaEventDestroy", event) == 0


def stream_destroyed_with_recorded_tensors() -> None:
    stream = created("cudaStreamCreate")
    x = torch.ones(1000, device="cuda")
    x.record_stream(torch.cuda.ExternalStream(stream.value or 0))
    assert code("cudaStreamDestroy", stream) == 0
    del x
    torch.cuda.synchronize()
    assert float(torch.ones(1000, device="cuda").sum()) == 1000


def stream_destroyed_while_it_captures() -> None:
    stream = created("cudaStreamCreate")
    assert code("cudaStreamBeginCapture", stream, 0) == 0
    assert code("cudaStreamDestroy", stream) == 0
    assert float(torch.ones(3, device="cuda").sum()) == 3
    torch.cuda.synchronize()


def stream_garbage() -> None:
    assert code("cudaStreamDestroy", GARBAGE) == INVALID_HANDLE
    assert code("cudaStreamDestroy", None) == INVALID_HANDLE
    assert code("cudaStreamGetPriority", GARBAGE, ctypes.byref(ctypes.c_int())) == INVALID_HANDLE


def event_destroyed_twice() -> None:
    event = created("cudaEventCreate")
    assert [code("cudaEventDestroy", event) for _ in range(2)] == [0, INVALID_HANDLE]


def event_used_after_it_was_destroyed() -> None:
    for event in (created("cudaEventCreate"), GARBAGE, None):
        code("cudaEventDestroy", event)
        milliseconds = ctypes.byref(ctypes.c_float())
        assert code("cudaEventRecord", event, None) == INVALID_HANDLE
        assert code("cudaEventQuery", event) == INVALID_HANDLE
        assert code("cudaEventSynchronize", event) == INVALID_HANDLE
        assert code("cudaStreamWaitEvent", None, event, 0) == INVALID_HANDLE
        assert code("cudaEventElapsedTime", milliseconds, event, event) == INVALID_HANDLE


def graph_destroyed_twice() -> None:
    stream = created("cudaStreamCreate")
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    assert code("cudaStreamBeginCapture", stream, 2) == 0
    assert code("cudaStreamEndCapture", stream, ctypes.byref(graph)) == 0
    assert code("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong()) == 0
    assert [code("cudaGraphDestroy", graph) for _ in range(2)] == [0, INVALID_VALUE]
    assert code("cudaGraphLaunch", executable, None) == 0
    assert [code("cudaGraphExecDestroy", executable) for _ in range(2)] == [0, INVALID_VALUE]
    assert code("cudaGraphLaunch", executable, None) == INVALID_VALUE
    assert code("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong()) != 0
    assert code("cudaGraphGetNodes", graph, None, ctypes.byref(SIZE())) == INVALID_VALUE
    assert code("cudaStreamDestroy", stream) == 0


def pool_garbage() -> None:
    value = ctypes.byref(ctypes.c_uint64())
    assert code("cudaMemPoolTrimTo", GARBAGE, SIZE(0)) == INVALID_VALUE
    assert code("cudaMemPoolGetAttribute", GARBAGE, 4, value) == INVALID_VALUE
    assert code("cudaMemPoolSetAttribute", GARBAGE, 4, value) == INVALID_VALUE


def device_of_nowhere() -> None:
    for device in (-1, 1, 99):
        assert code("cudaSetDevice", device) == 101
        assert isinstance(
            outcome(lambda d: torch.ones(1, device=d), f"cuda:{device}"), RuntimeError
        )
    assert code("cudaDeviceGetDefaultMemPool", ctypes.byref(ctypes.c_void_p()), 99) == 101


def copies_beyond() -> None:
    """A copy outside of what is allocated is refused, also if the addresses are of the device."""
    pointer = allocated(2**21)
    end = ctypes.c_void_p((pointer.value or 0) + 2**21)
    text = ctypes.create_string_buffer(64)
    for to, source in ((end, text), (text, end), (end, end)):
        assert code("cudaMemcpy", to, source, SIZE(64), 4) == INVALID_VALUE
    assert code("cudaMemcpy", pointer, text, SIZE(2**62), 4) == INVALID_VALUE
    assert code("cudaMemset", end, 1, SIZE(64)) == INVALID_VALUE
    assert code("cudaMemset", pointer, 1, SIZE(2**62)) == INVALID_VALUE
    assert code("cudaMemcpy", None, None, SIZE(0), 4) == 0
    assert code("cudaFree", pointer) == 0
    assert code("cudaMemset", pointer, 1, SIZE(64)) == INVALID_VALUE


def virtual_memory_released_twice() -> None:
    class Properties(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_int) for name in ("type", "handles", "kind", "id"))

    memory = ctypes.c_void_p()
    wanted = ctypes.create_string_buffer(bytes(Properties(1, 0, 1, 0)), 64)
    none = ctypes.c_ulonglong(0)
    assert code("cuMemCreate", ctypes.byref(memory), SIZE(2**21), wanted, none) == 0
    assert [code("cuMemRelease", memory) for _ in range(2)] == [0, INVALID_VALUE]
    assert (
        code("cuMemMap", ctypes.c_void_p(2**40), SIZE(2**21), SIZE(0), memory, none)
        == INVALID_VALUE
    )
    assert code("cuMemAddressFree", ctypes.c_void_p(2**40), SIZE(2**21)) == INVALID_VALUE
    assert code("cuMemUnmap", ctypes.c_void_p(2**40), SIZE(2**21)) == INVALID_VALUE
    assert code("cuMemCreate", ctypes.byref(memory), SIZE(2**63), wanted, none) == OUT_OF_MEMORY
    reserve = ctypes.byref(ctypes.c_void_p()), SIZE(2**63), SIZE(0), ctypes.c_void_p(), none
    assert code("cuMemAddressReserve", *reserve) == OUT_OF_MEMORY


def handles_of_other_processes() -> None:
    for function in ("cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"):
        assert code(function, ctypes.create_string_buffer(64), allocated(), 0) == 801
    x = torch.ones(3, device="cuda")
    try:
        x.untyped_storage()._share_cuda_()
    except RuntimeError:
        return
    raise AssertionError("shared")


def forked(child: Callable[[], object]) -> int:
    """Return how a forked process ends that calls a function: its status, or a signal below 0."""
    process = os.fork()
    if process == 0:
        status = 2
        try:
            child()
            status = 0
        except RuntimeError:
            status = 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def fork_in_the_middle() -> None:
    """Torch refuses CUDA in a forked process; what exists there can be dropped."""
    kept = [count(1000, "cuda")]
    assert forked(lambda: torch.ones(1, device="cuda")) == 1
    assert forked(kept.clear) == 0
    assert forked(lambda: torch.ones(3).sum()) == 0
    assert float(kept[0].sum()) == 499500


def fork_in_a_stream_and_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        assert forked(lambda: None) == 0
    graph.replay()
    assert float(x.sum()) == 4


def fork_in_backward() -> None:
    statuses = []

    class Forking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            statuses.append(forked(lambda: None))
            return gradient

    x = ones(3, d="cuda").requires_grad_()
    Forking.apply(x).sum().backward()
    assert statuses == [0]
    assert x.grad is not None
    assert float(x.grad.sum()) == 3


def graph_of_deleted() -> None:
    """A graph keeps what it needs when its inputs are deleted, and its memory pool is emptied."""
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(1000, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 2
    del x
    gc.collect()
    torch.cuda.empty_cache()
    graph.replay()
    assert y.shape == (1000,)
    graph.reset()
    try:
        graph.replay()
    except RuntimeError:
        return
    raise AssertionError("replayed")


def graph_left_open() -> None:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device="cuda").item()
    except RuntimeError:
        assert float(torch.ones(3, device="cuda").sum()) == 3
        return
    raise AssertionError("captured")


def storage_freed_before_its_views() -> None:
    x = count(1000, "cuda")
    y = x[10:20]
    y.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    try:
        y.sum().item()
    except RuntimeError:
        return
    raise AssertionError("read")


def storage_shrinks_before_its_views() -> None:
    """What lies behind the storage is not known, but it is memory of the device."""
    x = count(100, "cuda")
    x.untyped_storage().resize_(16)
    x.sum().item()
    assert x[:4].tolist() == [0, 1, 2, 3]


def cache_emptied_in_use() -> None:
    kept = [count(1000, "cuda") for _ in range(50)]
    views = [x[::2] for x in kept]
    kept.clear()
    torch.cuda.empty_cache()
    assert [float(view[1]) for view in views] == [2.0] * 50


# ---- Pools, pointers, fills and memory of two and three dimensions ----


class PoolProperties(ctypes.Structure):
    """``cudaMemPoolProps``; the last fields are not used."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "handles", "place", "id")),
        ("security", ctypes.c_void_p),
        ("most", SIZE),
        ("rest", ctypes.c_char * 56),
    )


class Pitched(ctypes.Structure):
    """``cudaPitchedPtr``."""

    _fields_ = (("start", ctypes.c_void_p), *((name, SIZE) for name in ("pitch", "x", "y")))


class Extent(ctypes.Structure):
    """``cudaExtent``."""

    _fields_ = tuple((name, SIZE) for name in ("width", "height", "depth"))


def pool(most: int = 0) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    wanted = PoolProperties(kind=1, place=1, most=most)
    assert code("cudaMemPoolCreate", ctypes.byref(handle), ctypes.byref(wanted)) == 0
    return handle


def from_pool(handle: ctypes.c_void_p, size: int = 2**20) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    assert code("cudaMallocFromPoolAsync", ctypes.byref(found), SIZE(size), handle, None) == 0
    return found


def available() -> int:
    free, total = SIZE(), SIZE()
    assert code("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def pool_destroyed_twice() -> None:
    handle = pool()
    assert [code("cudaMemPoolDestroy", handle) for _ in range(2)] == [0, INVALID_VALUE]
    assert code("cudaMemPoolTrimTo", handle, SIZE(0)) == INVALID_VALUE
    assert code("cudaDeviceSetMemPool", 0, handle) == INVALID_VALUE


def pool_destroyed_in_use() -> None:
    before, handle = available(), pool()
    kept = [from_pool(handle, 2**25) for _ in range(3)]
    assert code("cudaMemPoolDestroy", handle) == 0
    out = ctypes.byref(ctypes.c_void_p())
    assert code("cudaMallocFromPoolAsync", out, SIZE(64), handle, None) == INVALID_VALUE
    assert code("cudaMemset", kept[2], 7, SIZE(2**25)) == 0
    assert [code("cudaFreeAsync", pointer, None) for pointer in kept] == [0, 0, 0]
    assert code("cudaFreeAsync", kept[0], None) == INVALID_VALUE
    assert available() == before


def pool_of_a_device_destroyed() -> None:
    handle, default, now = pool(), ctypes.c_void_p(), ctypes.c_void_p()
    assert code("cudaDeviceGetDefaultMemPool", ctypes.byref(default), 0) == 0
    assert code("cudaDeviceSetMemPool", 0, handle) == 0
    assert code("cudaMemPoolDestroy", handle) == 0
    assert code("cudaDeviceGetMemPool", ctypes.byref(now), 0) == 0
    assert now.value == default.value
    assert code("cudaMemPoolDestroy", default) == INVALID_VALUE
    assert code("cudaMemPoolDestroy", None) == INVALID_VALUE


def pool_with_garbage() -> None:
    out = ctypes.byref(ctypes.c_void_p())
    for wanted in ({}, {"kind": 1}, {"kind": 9, "place": 1}, {"kind": 1, "place": 1, "id": 99}):
        assert code("cudaMemPoolCreate", out, ctypes.byref(PoolProperties(**wanted))) != 0
    for handle in (GARBAGE, None):
        assert code("cudaDeviceSetMemPool", 0, handle) == INVALID_VALUE
        assert code("cudaMallocFromPoolAsync", out, SIZE(64), handle, None) == INVALID_VALUE


def pool_with_a_limit() -> None:
    handle, out = pool(most=2**20), ctypes.byref(ctypes.c_void_p())
    for size in (2**20 + 1, 2**62, 2**64 - 1):
        assert code("cudaMallocFromPoolAsync", out, SIZE(size), handle, None) == OUT_OF_MEMORY
    assert code("cudaFree", from_pool(handle)) == 0
    assert code("cudaMemPoolTrimTo", handle, SIZE(2**64 - 1)) == 0
    assert code("cudaMemPoolDestroy", handle) == 0


def pool_attributes_of_nothing() -> None:
    handle, value = pool(), ctypes.c_uint64(3)
    for which in (-1, 0, 9, 2**31 - 1):
        assert code("cudaMemPoolGetAttribute", handle, which, ctypes.byref(value)) == INVALID_VALUE
        assert code("cudaMemPoolSetAttribute", handle, which, ctypes.byref(value)) == INVALID_VALUE
    for which in (5, 6, 7, 8):  # what is in use cannot be set, and the highest only to zero
        assert code("cudaMemPoolSetAttribute", handle, which, ctypes.byref(value)) == INVALID_VALUE
    assert code("cudaMemPoolDestroy", handle) == 0


def pools_in_threads() -> None:
    before, failed = available(), []

    def work() -> None:
        try:
            for _ in range(8):
                handle = pool()
                kept = [from_pool(handle, size) for size in (1, 2**20, 2**22)]
                assert code("cudaMemPoolDestroy", handle) == 0
                assert [code("cudaFreeAsync", pointer, None) for pointer in kept] == [0, 0, 0]
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert available() == before


def pooled_memory_freed_twice() -> None:
    pointer = ctypes.c_void_p()
    assert code("cudaMallocAsync", ctypes.byref(pointer), SIZE(64), None) == 0
    assert code("cudaFreeAsync", pointer, None) == 0
    assert code("cudaFree", pointer) == INVALID_VALUE
    assert code("cudaFreeAsync", GARBAGE, None) == INVALID_VALUE


def memory_pool_of_torch_deleted_in_use() -> None:
    own = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(own):
        x = count(1000, "cuda")
    del own
    gc.collect()
    torch.cuda.empty_cache()
    assert float(x.sum()) == 499500


def pointer_attributes_of_garbage() -> None:
    value = ctypes.create_string_buffer(16)
    pointer = allocated()
    for which in range(1, 18):
        assert code("cuPointerGetAttribute", value, which, GARBAGE) == INVALID_VALUE
    for which in (-1, 0, 5, 99, 2**31 - 1):
        assert code("cuPointerGetAttribute", value, which, pointer) == 801
    for which in (1, 2, 99):
        assert code("cuPointerSetAttribute", value, which, pointer) == INVALID_VALUE
    assert code("cuPointerSetAttribute", value, 6, GARBAGE) == INVALID_VALUE
    assert code("cudaFree", pointer) == 0
    assert code("cuPointerGetAttribute", value, 2, pointer) == INVALID_VALUE
    assert code("cuPointerSetAttribute", value, 6, pointer) == INVALID_VALUE


def pointer_attributes_keep_to_their_sizes() -> None:
    """Nothing is written behind an answer, which has four or eight bytes."""
    sizes = {1: 8, 2: 4, 3: 8, 6: 4, 7: 8, 8: 4, 9: 4, 11: 8, 12: 8, 13: 4, 17: 8}
    pointer = allocated()
    for address in (pointer, GARBAGE):
        values = [ctypes.create_string_buffer(b"\xaa" * 16, 16) for _ in sizes]
        which = (ctypes.c_int * len(sizes))(*sizes)
        at = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, values))
        assert code("cuPointerGetAttributes", len(sizes), which, at, address) == 0
        for value, size in zip(values, sizes.values(), strict=True):
            assert value.raw[size:] == b"\xaa" * (16 - size)
    assert code("cudaFree", pointer) == 0


def fills_beyond() -> None:
    pointer = allocated(2**21)
    last = ctypes.c_void_p((pointer.value or 0) + 2**21 - 4)
    for bits in (8, 16, 32):
        for many in (8, 2**40, 2**62, 2**64 - 1):
            assert code(f"cuMemsetD{bits}_v2", last, 1, SIZE(many)) == INVALID_VALUE
        assert code(f"cuMemsetD{bits}_v2", last, 1, SIZE(1)) == 0
        assert code(f"cuMemsetD{bits}_v2", last, 1, SIZE(0)) == 0
    assert code("cudaFree", pointer) == 0
    assert code("cuMemsetD32_v2", last, 1, SIZE(1)) == INVALID_VALUE


def fills_of_rows_beyond() -> None:
    pointer = allocated(2**21)
    for pitch, width, height in ((2**20, 2**20, 3), (2**62, 4, 9), (0, 2**22, 1), (4096, 8, 2**40)):
        sizes = SIZE(width), SIZE(height)
        assert code("cudaMemset2D", pointer, SIZE(pitch), 1, *sizes) == INVALID_VALUE
        assert code("cuMemsetD2D32_v2", pointer, SIZE(pitch), 1, *sizes) == INVALID_VALUE
    assert code("cudaMemset2D", pointer, SIZE(8), 1, SIZE(0), SIZE(2**62)) == 0
    assert code("cudaFree", pointer) == 0


def fills_of_slices_beyond() -> None:
    block = Pitched()
    assert code("cudaMalloc3D", ctypes.byref(block), Extent(100, 4, 4)) == 0
    for extent in (Extent(100, 4, 2**12), Extent(2**62, 1, 1), Extent(100, 2**40, 1)):
        assert code("cudaMemset3D", block, 1, extent) == INVALID_VALUE
    far = Pitched(block.start, 2**61, 100, 4)
    assert code("cudaMemset3D", far, 1, Extent(1, 1, 9)) == INVALID_VALUE
    assert code("cudaMemset3D", block, 1, Extent(1, 1, 2**62)) == INVALID_VALUE
    assert code("cudaMemset3D", block, 1, Extent(0, 2**62, 2**62)) == 0
    assert code("cudaMemset3D", block, 1, Extent(100, 4, 4)) == 0
    assert code("cudaFree", ctypes.c_void_p(block.start)) == 0
    assert code("cudaMemset3D", block, 1, Extent(1, 1, 1)) == INVALID_VALUE


def malloc_of_rows_and_slices_huge() -> None:
    out, pitch, block = ctypes.c_void_p(), SIZE(), Pitched()
    at = ctypes.byref(out), ctypes.byref(pitch)
    for width, height in ((2**62, 1), (2**63, 2), (2**64 - 1, 1), (600, 2**60), (1, 2**62)):
        assert code("cudaMallocPitch", *at, SIZE(width), SIZE(height)) == OUT_OF_MEMORY
        wanted = Extent(width, height, 1)
        assert code("cudaMalloc3D", ctypes.byref(block), wanted) == OUT_OF_MEMORY
    wanted = Extent(1, 2**40, 2**40)
    assert code("cudaMalloc3D", ctypes.byref(block), wanted) == OUT_OF_MEMORY
    assert code("cuMemAllocPitch_v2", *at, SIZE(0), SIZE(4), 4) == INVALID_VALUE


def copies_of_rows_beyond() -> None:
    pointer, text = allocated(2**21), ctypes.create_string_buffer(64)
    for pitch, width, height in ((2**20, 8, 4), (2**62, 8, 5), (8, 2**40, 1)):
        to = pointer, SIZE(pitch), text, SIZE(0)
        assert code("cudaMemcpy2D", *to, SIZE(width), SIZE(height), 4) == INVALID_VALUE
    to = pointer, SIZE(8), text, SIZE(8)
    assert code("cudaMemcpy2D", *to, SIZE(0), SIZE(2**62), 4) == 0
    assert code("cudaFree", pointer) == 0


def kernels_of_nothing() -> None:
    name = ctypes.byref(ctypes.c_char_p())
    assert code("cuKernelGetName", name, None) == INVALID_VALUE
    assert code("cuFuncGetName", name, None) == INVALID_VALUE


def fills_by_the_driver_are_of_a_tensor() -> None:
    x = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    start = ctypes.c_void_p(x.data_ptr())
    assert code("cuMemsetD2D32_v2", start, SIZE(32), 5, SIZE(2), SIZE(3)) == 0
    assert (x.sum().item(), x[0].tolist()) == (30, [5, 5, 0, 0, 0, 0, 0, 0])


def pool_destroyed_in_a_capture() -> None:
    handle, graph = pool(), torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        assert code("cudaMemPoolDestroy", handle) == 0
    graph.replay()
    assert float(x.sum()) == 4


ON_CARD: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        # Before all captures: torch 2.11 aborts if a MemPool is deleted after one that failed.
        memory_pool_of_torch_deleted_in_use,
        *(free_twice, free_inside, free_of_tensor, free_garbage, malloc_huge, malloc_nothing),
        *(free_host_twice, free_host_of_others, free_host_of_registered, register_garbage),
        *(pinned_tensors, pinned_freed_in_use, stream_destroyed_twice, stream_destroyed_in_use),
        *(stream_destroyed_with_recorded_tensors, stream_destroyed_while_it_captures),
        *(stream_garbage, event_destroyed_twice, event_used_after_it_was_destroyed),
        *(graph_destroyed_twice, pool_garbage, device_of_nowhere, copies_beyond),
        *(virtual_memory_released_twice, handles_of_other_processes, fork_in_the_middle),
        *(fork_in_a_stream_and_a_capture, fork_in_backward, graph_of_deleted, graph_left_open),
        *(storage_freed_before_its_views, storage_shrinks_before_its_views, cache_emptied_in_use),
        *(pool_destroyed_twice, pool_destroyed_in_use, pool_of_a_device_destroyed),
        *(pool_with_garbage, pool_with_a_limit, pool_attributes_of_nothing, pools_in_threads),
        pooled_memory_freed_twice,
        *(pointer_attributes_of_garbage, pointer_attributes_keep_to_their_sizes, fills_beyond),
        *(fills_of_rows_beyond, fills_of_slices_beyond, malloc_of_rows_and_slices_huge),
        *(copies_of_rows_beyond, kernels_of_nothing, fills_by_the_driver_are_of_a_tensor),
        *(pool_destroyed_in_a_capture,),
    )
}


# ---- Running them ----

ERRORS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, BufferError)


def outcome(program: Program, device: str) -> Any:
    """Return the result on the CPU, or the error."""
    try:
        result = program(device)
        flat, _ = torch.utils._pytree.tree_flatten(result)
        return [
            value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in flat
        ]
    except ERRORS as error:
        return error


def compared(program: Program) -> str:
    expected, found = outcome(program, "cpu"), outcome(program, "cuda")
    if isinstance(expected, Exception) or isinstance(found, Exception):
        both = isinstance(expected, Exception) and isinstance(found, Exception)
        return "passed" if both else f"CPU: {expected!r}, card: {found!r}"
    torch.testing.assert_close(found, expected, equal_nan=True)
    return "passed"


def run(name: str) -> str:
    """Return "passed", or what is wrong."""
    try:
        result = compared(ON_BOTH[name]) if name in ON_BOTH else ON_CARD[name]() or "passed"
        assert float((torch.ones(8, device="cuda") + 1).sum()) == 16, "the device is not usable"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result


if __name__ == "__main__":
    emulated_cuda.load("a100")
    torch.ones(1, device="cuda")
    for name in sys.argv[1:] or [*ON_BOTH, *ON_CARD]:
        print(f"{name}: ", end="", flush=True)
        print(" ".join(run(name).split()), flush=True)
