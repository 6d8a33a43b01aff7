"""Tests of what a program reads back: sizes, errors, and values that were not computed.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import gc
import io
import pickle
import sys

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from values_on_both import MB, launch_unknown_kernel, on_both

from emulated_cuda.errors import DeviceAssertError, StaleValueError
from emulated_cuda.values import staleness
from pytest_cka_memory.meters.accelerator import segments_of

# ---- Sizes that depend on values ----


def test_sizes_that_depend_on_values_are_the_cpus():
    """An operator reads back a computed size, such as the number of selected elements."""
    x = torch.tensor([3, 1, 2, 2, 0, 5])
    mask = x > 1
    for function in (
        torch.nonzero,
        torch.bincount,
        lambda t: torch.unique(t, return_inverse=True, return_counts=True),
        lambda t: torch.unique(torch.stack([t, t], 1), dim=0),
        lambda t: torch.unique_consecutive(t, return_counts=True),
        lambda t: t[mask.to(t.device)],
        lambda t: t.masked_select(t > 1),
        lambda t: torch.repeat_interleave(t),
        lambda t: torch.repeat_interleave(t * 10, t),
        lambda t: torch.repeat_interleave(t * 10, t, output_size=13),
        lambda t: torch.segment_reduce(t[:2].float(), "max", lengths=t[3:5], unsafe=False),
        lambda t: torch.linalg.eigvals(t.float().diag(), out=complex_pair(t)[0]).abs(),
        lambda t: torch.linalg.eig(t.float().diag(), out=complex_pair(t))[0].abs(),
        lambda t: torch.histc(t.float(), 4),
        lambda t: t.clone().index_put_((t > 1,), t[t > 1] * 2),
        lambda t: torch.argwhere(t),
    ):
        on_both(function, x)


def complex_pair(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a vector and a matrix to write eigenvalues and eigenvectors into."""
    size, options = len(like), {"dtype": torch.complex64, "device": like.device}
    return torch.empty(size, **options), torch.empty(size, size, **options)


def test_selected_elements_have_their_memory():
    """A selection allocates the memory of its elements; without values it would be empty."""
    x = torch.randn(MB, device="cuda")
    wanted = int((x.cpu() > 0).sum()) * 4
    gc.collect()
    before = torch.cuda.memory_allocated()
    selected = x[x > 0]
    allocated = torch.cuda.memory_allocated() - before
    assert selected.numel() * 4 == wanted
    assert wanted <= allocated < wanted + MB  # a block that is less than 1 MB larger is used whole


# ---- Never stale ----


NOT_COMPUTED = "aten::_fill_mem_eff_dropout_mask_"


def not_computed() -> torch.Tensor:
    """Return a tensor that an operator has written of which no CPU form is known."""
    return torch.ops.aten._fill_mem_eff_dropout_mask_(torch.zeros(1, 1, 8, 8).cuda(), 0.5, 1, 0)


def test_read_of_a_value_that_was_not_computed_raises_and_names_the_operator():
    """A read of a value that was not computed raises and names the operator it comes from.

    So does what was computed from it, but not what replaces it.
    """
    unknown = not_computed()
    derived = unknown + 1
    for read in (
        lambda: unknown.cpu(),
        lambda: derived.sum().item(),
        lambda: derived[derived > 0],
        lambda: repr(derived),
        lambda: torch.equal(derived, derived),
    ):
        with pytest.raises(StaleValueError, match=NOT_COMPUTED):
            read()
    derived.zero_()
    assert derived.sum().item() == 0
    assert torch.ones(2, device="cuda").sum().item() == 2


READS = {
    "pickle": pickle.dumps,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "save-legacy": lambda t: torch.save(t, io.BytesIO(), _use_new_zipfile_serialization=False),
    "storage": lambda t: t.untyped_storage()[0],
    "dlpack": lambda t: torch.from_dlpack(t).cpu(),
    "dlpack-part": lambda t: torch.from_dlpack(t[0, 0, 2:]).cpu(),
    "other-device": lambda t: t.to("cuda:1").cpu(),
    "not-blocking": lambda t: t.to("cpu", non_blocking=True),
    "condition": lambda t: 1 if t[0, 0, 0, 0] else 0,
    "assert": lambda t: torch._assert_async(t[0, 0, 0, 0]),
    "index": lambda t: torch.ones(3, device="cuda")[t.view(-1).long() + 9],
    "shape": lambda t: t.to_sparse(),
    "closeness": lambda t: torch.testing.assert_close(t, t.clone()),
    "out": lambda t: torch.add(t, 1, out=torch.empty_like(t)).cpu(),
}


@pytest.mark.parametrize("read", READS)
def test_value_that_was_not_computed_is_noticed_by_every_kind_of_read(read):
    """Every kind of read notices a value that was not computed, also through another storage."""
    unknown = not_computed()
    with pytest.raises(StaleValueError, match=NOT_COMPUTED):
        READS[read](unknown)


def test_memory_that_is_filled_through_another_storage_is_known():
    """DLPack gives memory another storage; values that are written through it are known."""
    unknown = not_computed()
    torch.from_dlpack(unknown).fill_(3)
    assert unknown.sum().item() == 3 * 64


def test_read_after_an_unknown_kernel_raises_and_names_it():
    """An unknown kernel may have written anything that existed; a read raises and names it."""
    before = torch.ones(4, device="cuda")
    launch_unknown_kernel()
    with pytest.raises(StaleValueError, match=r"compute the kernel my_kernel, because"):
        before.cpu()
    with pytest.raises(StaleValueError, match="my_kernel"):
        (before * 2).sum().item()
    assert torch.ones(3, device="cuda").sum().item() == 3
    before.fill_(2)
    assert before.tolist() == [2, 2, 2, 2]


def test_values_that_follow_an_unknown_kernel_are_known():
    """After an unknown kernel, values of new tensors and sizes that depend on them are known."""
    old = torch.ones(6, device="cuda")
    launch_unknown_kernel()
    left, right = (torch.randn(2, 3).cuda().requires_grad_() for _ in range(2))
    loss = F.mse_loss(left, right)  # a number in memory for more
    (gradient,) = torch.autograd.grad(loss, left)
    assert loss.item() == (left - right).square().mean().item() != 0
    torch.testing.assert_close(gradient.cpu(), ((left - right) / 3).detach().cpu())
    parts = torch.empty(4, device="cuda")
    parts[:2], parts[2:] = 1, 2
    assert parts[parts > 1].tolist() == [2, 2]
    assert parts.to_sparse().values().unique().tolist() == [1, 2]
    old[:2] = 0
    with pytest.raises(StaleValueError, match="my_kernel"):
        old.sum().item()
    unknown = not_computed()
    with pytest.raises(StaleValueError, match=NOT_COMPUTED):
        unknown.cpu()


# ---- Errors ----


def test_index_out_of_range_raises_at_once():
    """An index out of range raises at once; on a card, an assert of the kernel reports it later."""
    x = torch.zeros(3, device="cuda")
    for use in (
        lambda: torch._assert_async(x[0], "x is zero"),
        lambda: torch.bernoulli(x + 2),
        lambda: x[torch.tensor([5], device="cuda")],
        lambda: x.gather(0, torch.tensor([5], device="cuda")),
        lambda: F.embedding(torch.tensor([7], device="cuda"), torch.ones(3, 2, device="cuda")),
        lambda: F.cross_entropy(x[None], torch.tensor([9], device="cuda")),
    ):
        with pytest.raises(DeviceAssertError, match="On a card this is a device-side assert"):
            use()
    assert issubclass(DeviceAssertError, IndexError)
    assert issubclass(DeviceAssertError, RuntimeError)


def test_arguments_that_the_operator_checks_are_accepted_or_refused_at_once():
    """An operator that reads back whether its arguments are valid raises at once.

    From 2.14 on, torch checks ``normal`` in a kernel instead, as a device-side assert.
    """
    mean, std = torch.zeros(100, device="cuda"), torch.full((100,), 2.0, device="cuda")
    for draw in (
        lambda scale: torch.normal(mean, scale),
        lambda scale: torch.normal(0.0, scale),
        lambda scale: torch.normal(mean, scale, out=torch.empty(100, device="cuda")),
    ):
        assert 1 < draw(std).std().item() < 3
        with pytest.raises(RuntimeError, match=r"normal expects all elements of std >= 0\.0"):
            draw(-std)
    repeats = torch.tensor([1, -1], device="cuda")
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.repeat_interleave(repeats)
    lengths = torch.tensor([1, 5], device="cuda")
    with pytest.raises(RuntimeError, match="Expected all rows of lengths along axis"):
        torch.segment_reduce(torch.ones(3, device="cuda"), "max", lengths=lengths)


def test_tensors_on_two_devices_are_refused():
    """PyTorch's own checks refuse tensors on two devices in one operator, as on a card."""
    for other in (torch.ones(2), torch.ones(2, device="cuda:1")):
        with pytest.raises(RuntimeError, match="on the same device"):
            torch.ones(2, device="cuda") + other
    x = torch.ones(3, 4, device="cuda")
    mask, index = torch.tensor([[True], [False], [True]]), torch.tensor([0])
    for use in (
        lambda: torch.where(mask, x, x),
        lambda: x.masked_fill(mask, 2.0),
        lambda: x.masked_select(mask),
        lambda: x.index_select(0, index),
        lambda: x.clone().index_put_((index,), torch.ones(4)),
        lambda: torch.ones(3)[index.cuda()],
        lambda: torch.cat([x, torch.ones(1, 4)]),
        lambda: F.embedding(index, x),
    ):
        with pytest.raises(RuntimeError, match=r"same device|different from other tensors"):
            use()


def test_numbers_and_indices_on_the_cpu_are_accepted():
    """Tensors without dimensions, and indices in brackets, may be on the CPU, as on a card."""
    x = torch.arange(12.0).view(3, 4)
    two, yes = torch.tensor(2.0), torch.tensor(True)
    rows, mask = torch.tensor([0, 2]), torch.tensor([True, False, True])
    for function in (
        lambda t: t + two,
        lambda t: two - t,
        lambda t: t.clone().mul_(two),
        lambda t: torch.pow(two, t),
        lambda t: torch.maximum(t, two),
        lambda t: torch.addcmul(t, t, two),
        lambda t: torch.lerp(t, t + 1, two),
        lambda t: torch.where(yes, t, t + 1),
        lambda t: torch.where(t > 1, t, two),
        lambda t: t.masked_fill(t > 1, two),
        lambda t: t.clone().fill_(two),
        lambda t: torch._foreach_mul([t, t + 1], two),
        lambda t: t[rows],
        lambda t: t[mask],
        lambda t: t[rows, torch.tensor([1, 3], device=t.device)],
        lambda t: t.clone().index_put_((rows,), two),
        lambda t: t.clone().index_put_((mask,), t[0]),
        lambda t: t.clone().index_put_((rows,), two.to(t.device), accumulate=True),
    ):
        on_both(function, x)


def test_failed_operators_keep_nothing():
    """A failed operator keeps neither its error nor its arguments alive."""
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        for use in (
            lambda: torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")],
            lambda: torch.linalg.inv(torch.zeros(2, 2, device="cuda")),
        ):
            with pytest.raises(RuntimeError):
                use()
        torch.linalg.inv(torch.eye(2, device="cuda"))
        torch.fft.fft(torch.ones(4, device="cuda"))
        torch.histc(torch.ones(4, device="cuda"))
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_conversion_to_semi_structured_weights_is_refused_with_what_to_do(monkeypatch):
    """The conversion of cuSPARSELt raises each time; that of CUTLASS has the weight's values."""
    weight = torch.tensor([0, 0, 1, 1], dtype=torch.float16, device="cuda").repeat(128, 32)
    semi_structured = torch.sparse.SparseSemiStructuredTensor
    monkeypatch.setattr(semi_structured, "_FORCE_CUTLASS", False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cusparseLt.*the dense weight gives the same"):
            torch.sparse.to_sparse_semi_structured(weight)
    monkeypatch.setattr(semi_structured, "_FORCE_CUTLASS", True)
    assert torch.equal(torch.sparse.to_sparse_semi_structured(weight).to_dense(), weight)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="references to True are not counted")
def test_snapshots_take_no_reference_that_python_counts():
    """Torch 2.14 gives one back for each; without a remedy enough of them end the process."""
    flags = (True, False)
    before = [sys.getrefcount(flag) for flag in flags]
    for _ in range(64):
        segments_of(torch.device("cuda", 0))
        staleness._segments()
    lost = [count - sys.getrefcount(flag) for count, flag in zip(before, flags, strict=True)]
    assert max(lost) < 32
