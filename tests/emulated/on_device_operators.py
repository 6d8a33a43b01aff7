"""Tests of operators that only CUDA has, called by their names in PyTorch's dispatcher.

``test_on_device.py`` runs them, after those of ``on_device_equivalents.py``, in a new process with
the plugin ``values_on_both``.
"""

import re
from fnmatch import filter as fnmatch_filter
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from values_on_both import OPERATORS_SEEN, on_both

from emulated_cuda import torch_private
from emulated_cuda.values import operators
from emulated_cuda.values.equivalents import EQUIVALENTS, by_name

pytestmark = pytest.mark.usefixtures("operators_seen")
aten = torch.ops.aten
FLOAT8 = torch.float8_e4m3fn
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
IN_PLACE = "_flash_attention_forward_no_dropout_inplace"


def assert_equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert found.is_cuda
    torch.testing.assert_close(
        found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance
    )


# ---- Decompositions ----


@pytest.mark.parametrize("size", [(2, 4, 4), (5, 3), (3, 5)])
def test_lu_without_pivots_multiplies_to_the_matrix(size):
    """LU without pivots, which only CUDA has, gives factors of the matrix and no exchanges."""
    a = torch.randn(size) + 4 * torch.eye(*size[-2:])
    permutation, lower, upper = torch.linalg.lu(a.cuda(), pivot=False)
    assert permutation.numel() == 0
    assert_equal(lower @ upper, a)
    factors, pivots, info = torch.linalg.lu_factor_ex(a.cuda(), pivot=False)
    assert_equal(factors.tril(-1)[..., : min(size[-2:])], lower.cpu().tril(-1))
    assert_equal(factors.triu()[..., : min(size[-2:]), :], upper.cpu())
    assert (pivots.cpu() == torch.arange(1, min(size[-2:]) + 1)).all()
    assert (info == 0).all()
    assert_equal(torch.linalg.lu_factor(a.cuda())[0], torch.linalg.lu_factor(a)[0])
    assert torch.linalg.lu_factor_ex(torch.zeros(2, 2).cuda(), pivot=False).info.item() == 1


@pytest.mark.parametrize("size", [(9, 4), (2, 9, 4)])
def test_least_squares_without_a_driver_are_those_of_gels(size):
    """The default driver of ``lstsq`` on CUDA is ``gels``, also in the forms of all results."""
    a, b = torch.randn(size), torch.randn(*size[:-1], 3)
    expected = torch.linalg.lstsq(a, b, driver="gels")
    for found in (torch.linalg.lstsq(a.cuda(), b.cuda()), _least_squares(a, b)):
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert_equal(one, other)
    with pytest.raises(RuntimeError, match="other than `gels` is not supported on CUDA"):
        torch.linalg.lstsq(a.cuda(), b.cuda(), driver="gelsd")


def _least_squares(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = tuple(torch.empty(0, device="cuda") for _ in range(4))
    out = (*out[:2], out[2].long(), out[3])
    return torch.linalg.lstsq(a.cuda(), b.cuda(), out=out)


@pytest.mark.parametrize("driver", [None, "gesvd", "gesvdj", "gesvda"])
def test_singular_values_are_the_same_with_each_driver(driver):
    """A method of cuSOLVER, which the CPU refuses to get, changes no singular value."""
    a = torch.randn(6, 4)
    u, values, vh = torch.linalg.svd(a.cuda(), full_matrices=False, driver=driver)
    assert_equal(values, torch.linalg.svdvals(a))
    assert_equal(u @ values.diag() @ vh, a)
    assert_equal(torch.linalg.svdvals(a.cuda(), driver=driver), torch.linalg.svdvals(a))


# ---- Convolutions ----


def test_convolutions_of_cudnn_are_the_plain_ones():
    """Convolutions of cuDNN, forward and transposed, which torch
    calls inside, have plain values.
    """
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    device, sizes, flags = (x.cuda(), w.cuda()), ([2, 2], [1, 1], 1), (False, False, False)
    found = aten.cudnn_convolution(*device, [1, 1], *sizes, *flags)
    assert_equal(found, F.conv2d(x, w, stride=2, padding=1), 1e-3)
    found = aten.cudnn_convolution_transpose(*device, [1, 1], [1, 1], *sizes, *flags)
    expected = F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)
    assert_equal(found, expected, 1e-3)


def test_fused_and_depthwise_convolutions_are_the_plain_ones():
    """Convolutions with bias and ReLU, and depthwise ones, have the values of the plain form."""
    x, w, b, z = (torch.randn(size) for size in ((2, 4, 6, 6), (3, 4, 3, 3), (3,), (2, 3, 4, 4)))
    sizes = [1, 1], [0, 0], [1, 1], 1
    plain = F.conv2d(x, w, b)
    of_device = [tensor.cuda() for tensor in (x, w, b, z)]
    assert_equal(aten.cudnn_convolution_relu(*of_device[:3], *sizes), plain.relu())
    fused = aten.cudnn_convolution_add_relu(*of_device[:2], of_device[3], 0.5, of_device[2], *sizes)
    assert_equal(fused, (plain + 0.5 * z).relu())
    of_each = torch.randn(4, 1, 3, 3)
    found = aten._conv_depthwise2d(
        of_device[0], of_each.cuda(), [3, 3], None, [1, 1], [1, 1], [1, 1]
    )
    assert_equal(found, F.conv2d(x, of_each, padding=1, groups=4))
    volume, of_volume = torch.randn(1, 2, 4, 4, 4), torch.randn(2, 1, 3, 3, 3)
    found = aten.conv_depthwise3d(
        *(volume.cuda(), of_volume.cuda(), [3, 3, 3], None, [1, 1, 1], [1, 1, 1], [1, 1, 1])
    )
    assert_equal(found, F.conv3d(volume, of_volume, padding=1, groups=2))


# ---- Products ----


def test_products_with_another_result_type_have_its_precision():
    """A product of bfloat16 with a result in single precision has that precision."""
    a = torch.randn(2, 4, 4).bfloat16()
    wide, device, out_dtype = a.float(), a.cuda(), torch.float32
    assert_equal(torch.mm(device[0], device[1], out_dtype=out_dtype), wide[0] @ wide[1])
    assert_equal(torch.bmm(device, device, out_dtype=out_dtype), wide @ wide)
    found = torch.addmm(device[0].float(), device[0], device[1], out_dtype=out_dtype, beta=2)
    assert_equal(found, 2 * wide[0] + wide[0] @ wide[1])
    found = torch.baddbmm(device.float(), device, device, out_dtype=out_dtype, alpha=3)
    assert_equal(found, wide + 3 * wide @ wide)


def test_product_with_gelu_takes_the_tanh_form_as_on_a_card():
    """CUDA's kernel approximates GELU by tanh, and the CPU's kernel of the same name does not."""
    bias, a, b = torch.randn(5), torch.randn(4, 3), torch.randn(3, 5)
    expected = torch.nn.functional.gelu(torch.addmm(bias, a, b), approximate="tanh")
    on_device = bias.cuda(), a.cuda(), b.cuda()
    out = torch.empty(4, 5, device="cuda")
    torch._addmm_activation(*on_device, use_gelu=True, out=out)
    assert_equal(torch._addmm_activation(*on_device, use_gelu=True), expected, 1e-6)
    assert_equal(out, expected, 1e-6)
    assert_equal(torch._addmm_activation(*on_device), torch.addmm(bias, a, b).relu(), 1e-6)


def test_status_that_no_kernel_wrote_is_no_error(monkeypatch):
    """`eigvals` with `out` reads back whether it converged, which only a kernel would write."""
    matrix = torch.randn(2, 5, 5)
    on_device, out = matrix.cuda(), torch.empty(0, dtype=torch.complex64, device="cuda")
    run, outcomes = operators.run, iter([torch.linalg.LinAlgError("failed to converge")])

    def failing_once(*args, **kwargs):
        for error in outcomes:
            raise error
        return run(*args, **kwargs)

    monkeypatch.setattr(operators, "run", failing_once)
    torch.linalg.eigvals(on_device, out=out)
    assert next(outcomes, None) is None
    torch.testing.assert_close(out.cpu(), torch.linalg.eigvals(matrix))


@pytest.mark.parametrize("driver", ["gesvd", "gesvdj", "gesvda"])
def test_singular_values_are_computed_with_each_driver_of_cusolver(driver):
    """The CPU refuses any driver; on a card they differ in speed only."""
    matrix = torch.randn(3, 4)
    expected = torch.linalg.svdvals(matrix)
    assert_equal(torch.linalg.svdvals(matrix.cuda(), driver=driver), expected, 1e-5)
    u, s, vh = torch.linalg.svd(matrix.cuda(), full_matrices=False, driver=driver)
    assert_equal(u @ s.diag() @ vh, matrix, 1e-5)
    out = torch.empty_like(u), torch.empty_like(s), torch.empty_like(vh)
    torch.linalg.svd(matrix.cuda(), full_matrices=False, driver=driver, out=out)
    assert_equal(out[1], expected, 1e-5)


def test_unknown_driver_of_singular_values_is_refused():
    """A name that cuSOLVER does not know is refused by name, as on a card."""
    with pytest.raises(RuntimeError, match="unknown svd driver gelsd"):
        torch.linalg.svd(torch.eye(3, device="cuda"), driver="gelsd")


@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_product_multiplies_by_its_scales(by_row):
    """A scaled product has one scale for a matrix, or one for each row."""
    a, b = torch.randn(16, 32).to(FLOAT8), torch.randn(16, 32).to(FLOAT8)
    scale_a, scale_b = (torch.rand(16, 1), torch.rand(1, 16)) if by_row else torch.rand(2)
    expected = (a.float() * scale_a) @ (b.float().T * scale_b)
    found = torch._scaled_mm(
        *(a.cuda(), b.cuda().T, scale_a.cuda(), scale_b.cuda()), out_dtype=torch.bfloat16
    )
    assert_equal(found, expected, 2e-2)
    assert hasattr(aten, "_scaled_mm_v2") == (VERSION >= (2, 10))
    if VERSION >= (2, 10):
        recipe = F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise
        given = a.cuda(), b.cuda().T, scale_a.cuda(), recipe, scale_b.cuda(), recipe
        assert_equal(F.scaled_mm(*given, output_dtype=torch.bfloat16), expected, 2e-2)


def test_scaled_product_of_eight_bits_saturates():
    """A card converts to eight bits with saturation; torch's own conversion does since 2.13."""
    a, one = torch.full((16, 32), 100.0).to(FLOAT8).cuda(), torch.ones(()).cuda()
    b = torch.where(torch.arange(16) % 2 > 0, 1, -1).float().repeat(32, 1) * 16
    found = torch._scaled_mm(a, b.to(FLOAT8).T.contiguous().T.cuda(), one, one, out_dtype=FLOAT8)
    assert found.cpu().float().unique().tolist() == [-448, 448]


def test_scales_of_blocks_are_not_taken_for_those_of_rows():
    """Scales of blocks are stored in another order than those of rows, so they are refused."""
    with pytest.raises(NotImplementedError, match="does not support block-wise scales"):
        EQUIVALENTS["aten::_scaled_mm_v2"].function(None, None, [], [3], [], [3], None, None)
    function = by_name(aten._scaled_mm.default, EQUIVALENTS["aten::_scaled_mm"].function)
    a, scale = torch.randn(32, 32).to(FLOAT8), torch.ones(32).to(torch.float8_e8m0fnu)
    with pytest.raises(NotImplementedError, match="does not support block-wise scales"):
        function(a, a, scale, scale)


@pytest.mark.parametrize("dims", [(2, 3), (3, 2), (2, 2), (3, 3)])
def test_scaled_product_of_groups_multiplies_each_group(dims):
    """A product of groups multiplies each with its own scales: rows, columns, summands, batch."""
    groups, ends = 2, torch.tensor([16, 48], dtype=torch.int32)
    a = torch.randn(48, 32) if dims[0] == 2 else torch.randn(groups, 16, 32)
    b = torch.randn(48, 32) if dims[1] == 2 else torch.randn(groups, 16, 32)
    if dims == (2, 2):
        a, b = torch.randn(16, 48), torch.randn(16, 48)
    a, b = a.to(FLOAT8), b.to(FLOAT8)
    count = groups if dims == (2, 2) else 1
    scale_a, scale_b = (
        torch.rand(count * m.shape[0]) if m.dim() == 2 else torch.rand(m.shape[:2]) for m in (a, b)
    )
    wide_a, wide_b = a.float(), b.float()
    spans = [slice(0, 16), slice(16, 48)]
    if dims == (2, 2):
        parts = [
            (wide_a[:, span] * scale_a.view(2, 16, 1)[g])
            @ (wide_b[:, span] * scale_b.view(2, 16, 1)[g]).T
            for g, span in enumerate(spans)
        ]
        expected = torch.stack(parts)
    else:
        wide_a, wide_b = wide_a * scale_a[..., None], wide_b * scale_b[..., None]
        lefts = wide_a if dims[0] == 3 else [wide_a[span] for span in spans]
        rights = wide_b if dims[1] == 3 else [wide_b[span] for span in spans]
        parts = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
        expected = torch.stack(parts) if dims == (3, 3) else torch.cat(parts, int(dims[1] == 2))
    found = torch._scaled_grouped_mm(
        *(a.cuda(), b.cuda().transpose(-2, -1), scale_a.cuda(), scale_b.cuda()),
        offs=None if dims == (3, 3) else ends.cuda(),
        out_dtype=torch.bfloat16,
    )
    assert_equal(found, expected, 5e-2)


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_product_with_a_weight_of_four_bits_is_that_with_the_numbers_it_stands_for(inner):
    """In a weight of four bits, a byte has the numbers of two
    columns, the first in its upper half.
    """
    numbers = torch.randint(16, (16, 256))
    weight = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    packed = aten._convert_weight_to_int4pack(weight.cuda(), inner)
    scales = torch.rand(4, 16, 2).bfloat16()
    factors, zeros = scales.float().repeat_interleave(64, 0).unbind(-1)
    x = torch.randn(3, 256).bfloat16()
    expected = x.float() @ ((numbers.float() - 8) * factors.T + zeros.T).T
    found = aten._weight_int4pack_mm(x.cuda(), packed, 64, scales.cuda())
    assert_equal(found / expected.abs().max().cuda(), expected / expected.abs().max(), 2e-2)


def test_packed_weight_has_the_order_of_a_card():
    """A packed weight has a card's order: lane 5 packs what was computed by hand from PyTorch's
    kernel.
    """
    numbers = torch.arange(16 * 32).view(16, 32) * 7 % 16
    weight = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    packed = aten._convert_weight_to_int4pack(weight.cuda(), 2)
    assert packed.shape == (2, 1, 32, 1)
    row = numbers[9].tolist()  # 8 * 1 + 5 // 4
    columns = [2, 10, 18, 26, 3, 11, 19, 27]  # 2 * (5 % 4), then 8 further on; the odd ones last
    expected = sum(row[column] << 4 * place for place, column in enumerate(columns))
    assert packed[1, 0, 5, 0].item() & 0xFFFFFFFF == expected


# ---- Attention ----


def test_attention_by_its_lower_operators_is_the_plain_one():
    """Attention by its lower operators, on sequences one behind the other, has plain gradients."""
    q, gradient = (torch.randn(5, 2, 16).bfloat16() for _ in range(2))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    spans = [slice(0, 2), slice(2, 5)]

    def plain(scores_of):
        leaf = q.float().requires_grad_()
        parts = [leaf[span].transpose(0, 1)[None] for span in spans]
        outputs = [F.scaled_dot_product_attention(p, p, p, **scores_of) for p in parts]
        output = torch.cat([part[0].transpose(0, 1) for part in outputs])
        return output.detach(), torch.autograd.grad(output, leaf, gradient.float())[0]

    device, of_output, begin = q.cuda(), gradient.cuda(), starts.cuda()
    for causal in (False, True):
        expected, of_input = plain({"is_causal": causal})
        flash = aten._flash_attention_forward(
            *(device, device, device, begin, begin, 3, 3, 0.0, causal, False)
        )
        assert_equal(flash[0], expected, 2e-2)
        found = aten._flash_attention_backward(
            *(of_output, device, device, device, flash[0], flash[1], begin, begin, 3, 3, 0.0),
            *(causal, flash[2], flash[3]),
        )
        assert_equal(sum(found), of_input, 5e-2)
        assert hasattr(aten, IN_PLACE) == (VERSION >= (2, 12))
        if VERSION >= (2, 12):
            into = torch.empty_like(device)
            getattr(aten, IN_PLACE)(
                *(into, device, device, device, begin, begin, 3, 3, 0.0, causal, False)
            )
            assert_equal(into, expected, 2e-2)
        batch = device[None]
        efficient = aten._efficient_attention_forward(
            *(batch, batch, batch, None, begin, begin, 3, 3, 0.0, int(causal), True)
        )
        assert_equal(efficient[0][0], expected, 2e-2)
        found = aten._efficient_attention_backward(
            *(of_output[None], batch, batch, batch, None, efficient[0], begin, begin, 3, 3),
            *(efficient[1], 0.0, efficient[2], efficient[3], int(causal), False),
        )
        assert_equal(sum(found[:3])[0], of_input, 5e-2)


def test_attention_of_cudnn_by_its_lower_operator_is_the_plain_one():
    """Attention of cuDNN by its lower operator has the plain form's values.

    Only autograd can call that of the backward pass without lengths of sequences.
    """
    q = torch.randn(1, 2, 8, 16).bfloat16()
    expected = F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    device = q.cuda()
    forward = aten._cudnn_attention_forward(
        device, device, device, None, None, None, 8, 8, True, 0.0, False, False
    )
    assert_equal(forward[0], expected, 2e-2)


# ---- Normalization, dropout, losses, embeddings ----


def test_forms_of_batch_normalization_are_the_plain_one():
    """Every form of batch normalization has the plain form's values, also that of several parts."""
    x, weight, gradient = torch.randn(6, 3, 4), torch.rand(3), torch.randn(6, 3, 4)
    leaf, of_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    mean, variance = torch.zeros(3), torch.ones(3)
    expected = F.batch_norm(leaf, mean, variance, of_weight, training=True)
    of_input, of_scale = torch.autograd.grad(expected, (leaf, of_weight), gradient)
    device, scale = x.cuda(), weight.cuda()
    running = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    found = aten._batch_norm_with_update(device, scale, None, *running, 0.1, 1e-5)
    assert_equal(found[0], expected.detach())
    assert_equal(running[0], mean)
    assert_equal(running[1], variance)
    gradients = aten.batch_norm_backward(
        *(gradient.cuda(), device, scale, *running, found[1], found[2], True, 1e-5),
        *([True, True, True], found[3]),
    )
    assert_equal(gradients[0], of_input)
    assert_equal(gradients[1], of_scale)
    for form in (
        aten._native_batch_norm_legit(device, scale, None, *running, True, 0.1, 1e-5),
        aten._native_batch_norm_legit.no_stats(device, scale, None, True, 0.1, 1e-5),
    ):
        assert_equal(form[0], expected.detach())
    none = torch.zeros(3, device="cuda")
    found = aten.cudnn_batch_norm(device, scale, none, *running, True, 0.1, 1e-5)
    assert_equal(found[0], expected.detach())
    gradients = aten.cudnn_batch_norm_backward(
        device, gradient.cuda(), scale, *running, found[1], found[2], 1e-5, found[3]
    )
    assert_equal(gradients[0], of_input)
    assert_equal(gradients[1], of_scale)
    parts = [torch.batch_norm_stats(part, 1e-5) for part in device.split(3)]
    means, stds = (torch.stack(values) for values in zip(*parts, strict=True))
    gathered = torch.batch_norm_gather_stats(device, means, stds, None, None, 0.1, 1e-5, 12)
    assert_equal(gathered[0], x.mean((0, 2)))


def test_fused_dropout_drops_what_its_mask_says():
    """The mask that fused dropout returns is the one by which it drops, and gives the gradient."""
    x = torch.rand(200, device="cuda") + 1
    dropped, mask = aten._fused_dropout(x, 0.25)
    assert_equal(dropped, x.cpu() * mask.cpu() * 4)
    assert 20 < mask.sum().item() < 80
    assert_equal(aten._masked_scale(x, mask, 4.0), dropped.cpu())


@pytest.mark.parametrize("as_tensors", [False, True])
def test_connectionist_loss_of_cudnn_is_the_plain_one(as_tensors):
    """CuDNN's connectionist loss with concatenated targets has the plain form's gradient."""
    logits = torch.randn(6, 2, 5).log_softmax(2)
    targets = torch.tensor([1, 2, 3], dtype=torch.int32)
    leaf, lengths = logits.clone().requires_grad_(), ([6, 6], [2, 1])
    expected = F.ctc_loss(leaf, targets, *map(torch.tensor, lengths), reduction="none")
    (of_input,) = torch.autograd.grad(expected.sum(), leaf)
    given = [torch.tensor(values, dtype=torch.int32) for values in lengths]
    given = [value.cuda() for value in given] if as_tensors else lengths
    own = targets.cuda() if as_tensors else targets
    operator = aten._cudnn_ctc_loss.Tensor if as_tensors else aten._cudnn_ctc_loss.default
    losses, gradient = operator(logits.cuda(), own, *given, 0, False, False)
    assert_equal(losses, expected.detach())
    assert_equal(gradient, of_input)


def test_bags_of_weighted_embeddings_are_the_plain_ones():
    """Embedding bags with a weight for each index are the plain
    ones, with and without gradients.
    """
    table, indices, starts = torch.randn(9, 4), torch.tensor([1, 1, 5, 8]), torch.tensor([0, 2])
    weights = torch.rand(4)

    def bag(table, weights, indices, starts):
        return F.embedding_bag(indices, table, starts, mode="sum", per_sample_weights=weights)

    on_both(bag, table, weights, indices, starts, gradients=True)
    found = aten._embedding_bag_forward_only(table.cuda(), indices.cuda(), starts.cuda())
    assert_equal(found[0], F.embedding_bag(indices, table, starts, mode="sum"))
    empty = torch._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device="cuda")
    assert empty.is_cuda


def test_affine_grids_of_cudnn_are_the_plain_ones():
    """Affine grids of cuDNN have the values and gradients of the plain form."""
    theta, gradient = torch.randn(2, 2, 3), torch.randn(2, 3, 4, 2)
    leaf = theta.clone().requires_grad_()
    expected = F.affine_grid(leaf, (2, 1, 3, 4), align_corners=True)
    (of_theta,) = torch.autograd.grad(expected, leaf, gradient)
    sizes = 2, 1, 3, 4
    assert_equal(aten.cudnn_affine_grid_generator(theta.cuda(), *sizes), expected.detach())
    found = aten.cudnn_affine_grid_generator_backward(gradient.cuda(), *sizes)
    assert_equal(found, of_theta)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_divided_by_zero_and_rounded_down_are_zero(dtype):
    """A card does not raise if a divisor is zero; other elements have their quotients."""
    a, b = torch.tensor([7, 7, 0], dtype=dtype), torch.tensor([2, 0, 0], dtype=dtype)
    expected = torch.tensor([3.0, 0.0, 0.0])
    x = a.cuda()
    assert_equal(torch.floor_divide(x, b.cuda()), expected)
    assert_equal(torch.div(x, b.cuda(), rounding_mode="floor"), expected)
    assert_equal(x // 0, torch.zeros(3))
    assert_equal(x.clone().floor_divide_(b.cuda()), expected)
    assert_equal(x.clone().div_(b.cuda(), rounding_mode="floor"), expected)


# ---- The table ----

WITHOUT_VALUES = {
    *("aten::record_stream", "aten::_cudnn_rnn_flatten_weight", "inductor_prims::*"),
    *("aten::_use_cudnn_ctc_loss*", "aten::_use_miopen_ctc_loss*"),
    *("aten::lstm.*", "aten::gru.*", "aten::rnn_tanh.*", "aten::rnn_relu.*", "_native::*"),
}
"""Operators that write no values, or call others, which are computed."""
RAISING_IN: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "_scaled_addmm*": ((2, 15), (3, 0)),
    "_scaled_grouped_mm_v2*": ((2, 10), (3, 0)),
    "_flash_attention_forward.quantized": ((2, 11), (3, 0)),
    "_scaled_dot_product_flash_attention.quantized": ((2, 11), (3, 0)),
    "_cudnn_attention_forward_no_dropout_inplace": ((2, 15), (3, 0)),
    "_philox_*": ((2, 12), (2, 14)),
}
"""Pattern -> the first version of torch with such operators for CUDA only, and the first without.

Other operators in the table are in all versions.
"""


def test_every_equivalent_was_compared_and_names_its_source():
    """A test here or in ``on_device_equivalents.py`` calls every equivalent, which names its
    source.
    """
    there = {name for name in EQUIVALENTS if torch_private.operator_of(name) is not None}
    assert len({*EQUIVALENTS} - there) <= 2  # those of newer versions
    missing = sorted(there - OPERATORS_SEEN)
    assert not missing, missing
    for name, entry in EQUIVALENTS.items():
        assert re.match(r"(aten/src/ATen|torch)/[\w/]+\.(cpp|cuh?|py)(: |$)", entry.source), name


def test_operators_that_only_cuda_has_are_computed_or_listed_as_raising():
    """Operators of CUDA alone are computed, or ``docs/explanation/values.md`` lists them as
    raising. There, ``*`` stands for anything. What it lists exists in this torch, unless
    `RAISING_IN` says so.
    """
    of_cuda = {*torch_private.registered("CUDA")}
    for key in ("CPU", "CompositeExplicitAutograd"):
        of_cuda -= {*torch_private.registered(key)}
    of_cuda = {name for name in of_cuda if torch_private.operator_of(name) is not None}
    page = Path(__file__).parents[2].joinpath("docs/explanation/values.md").read_text("utf-8")
    table = page.split("## What raises")[1].split("##")[0]
    first_column = "".join(row.split("|")[1] for row in table.splitlines() if "|" in row)
    listed = re.findall(r"`([\w:.*]+)`", first_column)
    assert {*RAISING_IN} <= {*listed}
    left = set()
    for name in of_cuda:
        base = re.sub(r"[._]out$", "", name)
        is_computed = name in EQUIVALENTS or base in EQUIVALENTS
        if not is_computed and not any(fnmatch(name, pattern) for pattern in WITHOUT_VALUES):
            left.add(name)
    found = {pattern: fnmatch_filter(left, f"*{pattern}") for pattern in listed}
    assert sorted(left.difference(*found.values())) == []
    always = (0, 0), (9, 9)
    for pattern, names in found.items():
        first, after = RAISING_IN.get(pattern, always)
        assert bool(names) == (first <= VERSION < after), pattern
