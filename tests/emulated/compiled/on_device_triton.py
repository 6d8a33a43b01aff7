"""Tests of kernels that Triton compiles and launches."""

import re
from pathlib import Path

import kernels
import pytest
import torch
import triton

from emulated_cuda.errors import StaleValueError
from emulated_cuda.triton.ttir import NOT_COMPUTED, OPERATIONS, TERMINATORS
from emulated_cuda.values import staleness

MB = 2**20


def test_kernel_has_the_values_of_torch_and_allocates_nothing():
    """A kernel has the values of torch's operator, and its launch allocates nothing."""
    x = torch.randn(70, 100, device="cuda")
    out = torch.empty_like(x)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    kernels.softmax_of_rows[(70,)](out, x, 100, x.stride(0), size=128)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.testing.assert_close(out, x.softmax(1))


def test_autotuned_kernel_is_computed_and_leaves_no_trace_of_the_choice():
    """An autotuned kernel computes, and allocates nothing to choose a configuration."""
    a, b = torch.randn(2, 50, 50, device="cuda")
    c = torch.zeros_like(a)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(2):
        kernels.product[lambda meta: (triton.cdiv(50, meta["rows"]),) * 2](a, b, c, 50)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.testing.assert_close(c, a @ b)


def test_kernel_that_another_process_has_compiled_is_computed(monkeypatch):
    """Inductor's workers pickle kernels whose names are too long for its own launcher."""
    from triton.compiler.compiler import CompiledKernel

    from emulated_cuda.triton import launches

    x = torch.randn(1, 100, device="cuda")
    out = torch.empty_like(x)
    compiled = kernels.softmax_of_rows[(1,)](out, x, 100, x.stride(0), size=128)
    monkeypatch.setattr(launches, "_texts", {})
    received = CompiledKernel.__new__(CompiledKernel)  # as Inductor's ``__setstate__`` does
    vars(received).update({**vars(compiled), "module": None, "function": None, "_run": None})
    out.zero_()
    received[(1, 1, 1)](out, x, 100, x.stride(0), 128)
    torch.testing.assert_close(out, x.softmax(1))


def test_random_numbers_are_those_of_philox():
    """Random numbers are those of Philox, of which the authors publish known answers."""
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    kernels.random_numbers[(1,)](out, 0, size=2)
    # Random123, kat_vectors: philox4x32 with 10 rounds, counter 0 and key 0.
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [number & 0xFFFFFFFF for number in out[:4].tolist()] == expected


def test_programs_take_a_lock_one_after_the_other():
    """A spin lock works: programs that wait run one after the other."""
    lock = torch.zeros(1, dtype=torch.int32, device="cuda")
    total, given = torch.zeros(1, device="cuda"), torch.arange(20.0, device="cuda")
    kernels.add_under_a_lock[(20,)](lock, total, given)
    assert (total.item(), lock.item()) == (190, 0)


def test_sort_scan_and_libdevice_have_the_values_of_torch():
    """Sorting, running sums and functions of libdevice have the values of torch."""
    x = torch.randn(32, device="cuda")
    out = torch.empty(96, device="cuda")
    kernels.sorted_and_ranked[(1,)](out, x, size=32)
    expected = torch.cat((x.sort()[0], x.cumsum(0), torch.atan2(x, x * x + 1)))
    torch.testing.assert_close(out, expected)


def test_descriptors_of_device_and_host_load_and_store_blocks():
    """Blocks by descriptors that the device or the host has made have the right elements."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    triton.set_allocator(
        lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )
    x = torch.randn(40, 32, device="cuda")
    out = torch.zeros_like(x)
    kernels.through_descriptor[(2, 1)](x, out, 40, 32, block=32)
    torch.testing.assert_close(out, x * 2)
    source, target = (TensorDescriptor(t, [40, 32], [32, 1], [32, 32]) for t in (x, out))
    kernels.through_host_descriptor[(2,)](source, target, block=32)
    torch.testing.assert_close(out, x + 1)


def test_write_far_outside_is_the_error_of_a_card_and_the_device_goes_on():
    """A write outside of all memory raises the error of CUDA, and later kernels still run."""
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError, match=r"illegal memory access .* kernel write_far writes 4 b"):
        kernels.write_far[(1,)](x, 2**40)
    kernels.copy[(1,)](out, x, size=4)
    assert out.tolist() == [1] * 4


def test_kernel_that_is_not_computed_marks_only_what_it_may_write():
    """A kernel with an unknown instruction is named, and leaves other tensors as they were."""
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    x = torch.ones(2, dtype=torch.int64, device="cuda")
    kernels.clock[(1,)](out, x, size=2)
    assert x.tolist() == [1, 1]
    with pytest.raises(
        StaleValueError,
        match=r"did not compute the Triton kernel clock: cannot read the register %globaltimer",
    ):
        out.cpu()


def test_assembly_that_has_addresses_may_write_there():
    """Tensors whose addresses are given to assembly that accesses memory have no known values."""
    x, out, other = (torch.ones(4, dtype=torch.int32, device="cuda") for _ in range(3))
    kernels.copy_by_assembly[(1,)](out, x, size=4)
    with pytest.raises(StaleValueError, match=r"cannot compute the PTX instruction ld\.global"):
        out.cpu()
    assert other.tolist() == [1] * 4


def test_values_computed_from_unknown_values_are_unknown():
    """A kernel that reads what an unknown kernel should have written writes unknown values."""
    x, out = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    staleness.mark(x, "x is not known")
    kernels.copy[(1,)](out, x, size=4)
    with pytest.raises(StaleValueError, match="x is not known"):
        out.cpu()


def test_modes_of_the_user_see_no_operator_of_a_launch(operators_seen):
    """A dispatch mode of the user sees the kernel's arguments made, and none of its arithmetic."""
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    with _Refusing():
        kernels.copy[(1,)](out, x, size=4)
    assert out.tolist() == [1] * 4


class _Refusing(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_every_operation_of_the_installed_triton_is_computed_or_known_not_to_be():
    """Each operation that the installed Triton has is in the table, or named as not computed."""
    library = next(Path(triton.__file__).parent.glob("_C/libtriton*.so")).read_bytes()
    pattern = rb"\0((?:tt|arith|math|scf|cf|ub)\.[a-z_0-9]+(?:\.return|\.in_parallel)?)(?=\0)"
    names = {name.decode() for name in re.findall(pattern, library)} - NOT_OPERATIONS
    known = {*OPERATIONS, *TERMINATORS, *NOT_COMPUTED}
    assert names - known == set()


NOT_OPERATIONS = {
    *("tt.1", "tt.cache_policy", "tt.constancy", "tt.contiguity", "tt.disallow_acc_multi_buffer"),
    *("tt.divisibility", "tt.flatten", "tt.latency", "tt.loop_schedule", "tt.loop_unroll_factor"),
    *("tt.num_stages", "tt.nv_tma_desc", "tt.pointee_type", "tt.pointer_range", "tt.ptr"),
    *("tt.scheduled_max_stage", "tt.self_latency", "tt.tensordesc", "tt.warp_specialize"),
    *("tt.func", "tt.desired_encoding", "math.h", "arith.fastmath", "arith.overflow"),
    *("arith.bounds_narrowing_failed", "tt.descriptor_gase", "arith.addui_extetf"),
}
"""Names of attributes and types, of what is around functions, and pieces of the machine's code."""
