"""Tests of computed values of operators that only CUDA has, or that the library cannot run.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from values_on_both import on_both

pytestmark = pytest.mark.usefixtures("operators_seen")

# ---- Operators that only CUDA has ----


def test_convolutions_and_their_gradients_are_the_cpus():
    """Convolutions with groups, dilation, transposed or depthwise have the CPU's values and
    gradients.
    """
    x, w = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3)
    on_both(lambda a, b: F.conv2d(a, b, stride=2, padding=1), x, w, gradients=True, tolerance=1e-3)
    on_both(lambda a, b: F.conv2d(a, b, dilation=2), x, w, gradients=True, tolerance=1e-3)
    on_both(lambda a, b: F.conv2d(a, b, groups=4), x, torch.randn(4, 1, 3, 3), gradients=True)
    back = torch.randn(4, 2, 3, 3)
    on_both(
        lambda a, b: F.conv_transpose2d(a, b, stride=2, output_padding=1),
        *(x, back),
        gradients=True,
        tolerance=1e-3,
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_is_the_cpus(training):
    """Batch normalization, of cuDNN and of torch, has the CPU's values and running statistics."""
    for enabled in (True, False):
        mean, variance = torch.zeros(3), torch.ones(3)

        def normalize(x, weight, mean=mean, variance=variance):
            own = mean.to(x.device, copy=True), variance.to(x.device, copy=True)
            return F.batch_norm(x, *own, weight, training=training), *own

        with torch.backends.cudnn.flags(enabled=enabled):
            on_both(
                lambda x, w: normalize(x, w)[0],
                *(torch.randn(4, 3, 5, 5), torch.rand(3)),
                gradients=True,
                tolerance=1e-4,
            )
            on_both(normalize, torch.randn(4, 3, 5, 5), torch.rand(3), tolerance=1e-4)


def test_transposed_convolutions_without_cudnn_round_once():
    """They add half precision in float32, as CUDA does; the CPU's own form rounds each sum."""
    for sizes in ((6, 6), (4, 4, 4)):
        x, w = torch.randn(1, 3, *sizes).bfloat16(), torch.randn(3, 3, *[3] * len(sizes)).bfloat16()
        operator = getattr(torch.ops.aten, f"slow_conv_transpose{len(sizes)}d")
        found = operator(x.cuda(), w.cuda(), w.shape[2:], None, [2] * len(sizes))
        expected = getattr(F, f"conv_transpose{len(sizes)}d")(x.float(), w.float(), stride=2)
        torch.testing.assert_close(found.cpu(), expected.bfloat16(), rtol=0.01, atol=0.01)


def test_parts_of_synchronized_batch_normalization_are_its_plain_form():
    """The parts of synchronized batch normalization, each on its data, give the plain form's
    values.
    """
    x, gradient = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    weight, bias = torch.rand(3), torch.rand(3)
    halves = [half.cuda() for half in x.split(3)]
    statistics = [torch.batch_norm_stats(half, 1e-5) for half in halves]
    means, stds = (torch.stack(parts) for parts in zip(*statistics, strict=True))
    counts = torch.full((2,), 12.0, device="cuda")
    running = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    mean, std = torch.batch_norm_gather_stats_with_counts(
        halves[0], means, stds, *running, 0.1, 1e-5, counts
    )
    own = torch.zeros(3), torch.ones(3)
    leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = F.batch_norm(leaf, *own, w, bias, training=True)
    expected.backward(gradient)
    found = torch.batch_norm_elemt(x.cuda(), weight.cuda(), bias.cuda(), mean, std, 1e-5)
    sums = torch.batch_norm_backward_reduce(
        gradient.cuda(), x.cuda(), mean, std, weight.cuda(), True, True, True
    )
    of_input = torch.batch_norm_backward_elemt(
        gradient.cuda(), x.cuda(), mean, std, weight.cuda(), sums[0], sums[1], counts.int()
    )
    for one, other in (
        (found, expected.detach()),
        (running[0], own[0]),
        (running[1], own[1]),
        (sums[2], w.grad),
        (of_input, leaf.grad),
    ):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


def test_other_normalizations_are_the_cpus():
    """Layer, group and RMS normalization have the CPU's values and gradients."""
    x, weight = torch.randn(4, 6, 5), torch.rand(5)
    on_both(lambda a, w: F.layer_norm(a, (5,), w), x, weight, gradients=True, tolerance=1e-4)
    on_both(lambda a: F.group_norm(a, 3), x, gradients=True, tolerance=1e-4)
    on_both(lambda a, w: F.rms_norm(a, (5,), w), x, weight, gradients=True, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "short"])
def test_attention_and_its_gradients_are_the_cpus(dtype, case):
    """Memory-efficient attention, and flash attention in half precision, have the CPU's values."""
    q, k, v = (torch.randn(2, 4, 16, 32, dtype=dtype) for _ in range(3))
    mask = torch.randn(2, 1, 16, 16, dtype=dtype)
    if case == "short":
        k, v, mask = k[:, :, :8], v[:, :, :8], mask[..., :8]

    def attend(q, k, v, mask):
        chosen = mask if case in ("mask", "short") else mask.sum() * 0 + mask
        kwargs = {"attn_mask": chosen} if case in ("mask", "short") else {}
        with sdpa_kernel(others):
            result = F.scaled_dot_product_attention(q, k, v, is_causal=case == "causal", **kwargs)
        return result if kwargs else (result, mask)

    # Torch prefers cuDNN's on an H100.
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    low = dtype == torch.bfloat16
    on_both(attend, q, k, v, mask, gradients=True, tolerance=5e-2 if low else 1e-4)


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "grouped"])
def test_attention_of_cudnn_and_its_gradients_are_the_cpus(case):
    """CuDNN's attention has the CPU's values, and so do its gradients."""

    def attend(q, k, v):
        chosen = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
        with sdpa_kernel(chosen):
            given = mask.to(q.device) if case == "mask" else None
            return F.scaled_dot_product_attention(q, k, v, given, **options)

    mask = torch.randn(2, 1, 16, 16, dtype=torch.bfloat16)
    groups = 2 if case == "grouped" else 4
    options = {"is_causal": case == "causal", "enable_gqa": case == "grouped"}
    q = torch.randn(2, 4, 16, 32, dtype=torch.bfloat16)
    k, v = (torch.randn(2, groups, 16, 32, dtype=torch.bfloat16) for _ in range(2))
    on_both(attend, q, k, v, gradients=True, tolerance=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_drops_the_same_elements_in_its_backward_pass(dtype):
    """Attention drops the same elements in both passes: v's
    gradient times v has the output's sum.
    """
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=dtype, device="cuda") for _ in range(3))
    v.requires_grad_()
    output = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    total, again = (gradient.float() * v.float()).sum().item(), output.float().sum().item()
    assert total == pytest.approx(again, rel=0.1, abs=0.3)
    plain = F.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(output, plain)


def test_varying_lengths_in_attention_are_separate_sequences():
    """Flash attention treats sequences one behind the other as separate ones."""
    q = torch.randn(5, 2, 16, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
    flash = torch.ops.aten._flash_attention_forward
    output = flash(q, q, q, starts, starts, 3, 3, 0.0, False, False)[0]
    for first, last in ((0, 2), (2, 5)):
        part = q[first:last].transpose(0, 1)[None].float()
        expected = F.scaled_dot_product_attention(part, part, part)[0].transpose(0, 1)
        torch.testing.assert_close(output[first:last].float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lengths", [None, (3, 1), (8, 9)])
def test_heads_of_nested_tensors_are_padded_with_zeros_to_a_multiple_of_eight(lengths):
    """Heads of nested tensors are padded to a multiple of eight, and do not change the result.

    Queries are divided by the root of a head's size; a bias is added to each position.
    """
    heads, size = 2, 4
    parts = [torch.randn(length, 3 * heads * size) for length in lengths or (4, 4)]
    bias = torch.randn(3 * heads * size)
    if lengths is None:
        given, positions = torch.stack(parts).cuda(), 4
    else:
        given = torch.nested.nested_tensor([part.cuda() for part in parts])
        positions = {3: 8, 8: 16}[lengths[0]]
    expected = torch.zeros(3, len(parts), heads, positions, size)
    for number, part in enumerate(parts):
        split = (part + bias).view(-1, 3, heads, size).permute(1, 2, 0, 3)
        expected[:, number, :, : len(part)] = split
    expected[0] /= size**0.5
    found = torch.ops.aten._transform_bias_rescale_qkv(given, bias.cuda(), heads)
    for value, own in zip(found, expected, strict=True):
        torch.testing.assert_close(value.cpu(), own)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
def test_recurrent_layers_and_their_gradients_are_the_cpus(kind, options):
    """Recurrent layers in cuDNN's form, with one buffer of weights, have the CPU's gradients."""
    layer = kind(4, 5, batch_first=True, **options)
    on_device = copy.deepcopy(layer).cuda()
    x = torch.randn(2, 3, 4)
    for one, values in ((layer, x), (on_device, x.cuda())):
        one(values)[0].square().sum().backward()
    torch.testing.assert_close(on_device(x.cuda())[0].cpu(), layer(x)[0])
    for one, other in zip(layer.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_and_their_gradients_are_the_cpus(kind):
    """Recurrent cells, which are fused kernels on CUDA, have the CPU's values and gradients."""
    cell = kind(4, 5)
    on_device = copy.deepcopy(cell).cuda()
    x = torch.randn(3, 4)
    for one, values in ((cell, x), (on_device, x.cuda())):
        found = one(values)
        (found[0] if isinstance(found, tuple) else found).square().sum().backward()
    for one, other in zip(cell.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


def test_recurrent_layer_drops_the_same_elements_in_its_backward_pass():
    """With the same seed, dropout in a recurrent layer gives the same output and gradients."""
    layer = nn.LSTM(4, 5, 2, dropout=0.5).cuda()
    found = []
    x = torch.randn(3, 2, 4, device="cuda")
    for _ in range(2):
        torch.cuda.manual_seed(3)
        output = layer(x)[0]
        found.append((output.detach(), *torch.autograd.grad(output.sum(), layer.weight_ih_l0)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(layer(x)[0], layer(x)[0])


def test_samplers_embeddings_and_losses_are_the_cpus():
    """Samplers, embeddings and losses have the CPU's values, also where CUDA uses other kernels."""
    image, grid = torch.randn(1, 2, 5, 5), torch.rand(1, 3, 3, 2) * 2 - 1
    on_both(
        lambda i, g: F.grid_sample(i, g, align_corners=True), image, grid, gradients=True,
        tolerance=1e-4,
    )  # fmt: skip
    on_both(
        lambda t: F.affine_grid(t, (2, 1, 3, 3), align_corners=True),
        torch.randn(2, 2, 3),
        gradients=True,
    )
    on_both(F.logsigmoid, torch.randn(7), gradients=True)
    table = torch.randn(9, 4)
    for mode in ("sum", "mean", "max"):
        indices, starts = torch.tensor([1, 1, 5, 8]), torch.tensor([0, 2])
        on_both(lambda w, i, s, m=mode: F.embedding_bag(i, w, s, mode=m), table, indices, starts)
    logits = torch.randn(6, 2, 5).log_softmax(2)
    on_both(
        lambda t: F.ctc_loss(t, torch.tensor([[1, 2], [3, 3]]).to(t.device), (6, 5), (2, 1)), logits
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_of_half_precision_in_single_precision_is_the_cpus(dtype):
    """A softmax of half precision has the CPU's values, up to the CPU's additional rounding if it
    does not return single precision.
    """
    values = torch.randn(3, 5).to(dtype)
    for function in (F.softmax, F.log_softmax):
        on_both(lambda t: function(t, -1, dtype=torch.float32), values, gradients=True)  # noqa: B023
        on_both(lambda t: function(t, -1), values, gradients=True, tolerance=2e-2)  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_softmax_and_products_of_half_precision_are_rounded_once(dtype):
    """A log softmax and a product of half precision are those of single precision, rounded once."""
    values = torch.randn(64, 300).to(dtype)
    factors = (1 + values / 64).float().to(dtype)
    device, wide = values.cuda(), values.float()
    by, wide_by = factors.cuda(), factors.float()
    out = torch.empty(64, dtype=dtype, device="cuda")
    out_of_logarithms = torch.empty_like(device)
    torch.ops.aten._log_softmax.out(device, 1, False, out=out_of_logarithms)
    pairs = [
        (device.log_softmax(1), wide.log_softmax(1)),
        (device.log_softmax(0), wide.log_softmax(0)),
        (out_of_logarithms, wide.log_softmax(1)),
        (by[0].prod(), wide_by[0].prod()),
        (by.prod(1), wide_by.prod(1)),
        (by.prod(0, keepdim=True), wide_by.prod(0, keepdim=True)),
        (torch.prod(by, 1, out=out), wide_by.prod(1)),
        (wide_by.cuda().prod(1, dtype=dtype), wide_by.prod(1)),
        (wide_by[0].cuda().prod(dtype=dtype), wide_by[0].prod()),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=0, atol=0)
    for found in (by.prod(1, dtype=torch.float32), by.prod(1, dtype=torch.float64).float()):
        torch.testing.assert_close(found.cpu(), wide_by.prod(1))
    assert torch.arange(1, 6).cuda().prod().item() == 120


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_sum_of_exponentials_in_half_precision_is_rounded_after_each_operator(dtype):
    """A card's logsumexp calls five operators of half precision, each of which rounds."""
    values = torch.randn(64, 300).to(dtype).cuda()
    largest = values.amax(1, keepdim=True)
    expected = (values - largest).exp().sum(1).log() + largest.squeeze(1)
    torch.testing.assert_close(values.logsumexp(1), expected, rtol=0, atol=0)


def test_optimizers_take_the_cpus_steps():
    """Foreach and fused optimizers work on lists of tensors, and take the CPU's steps."""
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"fused": True}),
    ):
        weights = []
        for device in ("cpu", "cuda"):
            weight = nn.Parameter(torch.linspace(-1, 1, 7, device="cpu").to(device))
            optimizer = kind([weight], lr=0.1, **options)
            for _ in range(3):
                optimizer.zero_grad()
                weight.square().sum().backward()
                optimizer.step()
            weights.append(weight.detach().cpu())
        torch.testing.assert_close(weights[1], weights[0])


# ---- What the library cannot run ----


def test_libraries_that_are_not_there_have_the_cpus_results():
    """Operators of cuSOLVER, cuFFT and cuSPARSE, which are not emulated, have the CPU's results."""
    x = torch.randn(4, 4) + 4 * torch.eye(4)
    spd = x @ x.T
    on_both(lambda t: torch.linalg.inv(t), x, gradients=True, tolerance=1e-3)
    on_both(lambda t: torch.linalg.cholesky(t), spd, tolerance=1e-3)
    on_both(lambda t: torch.linalg.eigvalsh(t), spd, tolerance=1e-3)
    on_both(lambda t: torch.linalg.svdvals(t), x, tolerance=1e-3)
    on_both(lambda t: torch.linalg.solve(t, t[:, :1]), x, tolerance=1e-3)
    on_both(lambda t: torch.fft.rfft(t).abs(), x, tolerance=1e-3)
    on_both(lambda t: torch.linalg.matrix_exp(t / 9), x, tolerance=1e-3)
    out = torch.empty(0, device="cuda")
    torch.linalg.inv(spd.cuda(), out=out)
    torch.testing.assert_close(out.cpu(), torch.linalg.inv(spd), rtol=1e-3, atol=1e-3)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2, device="cuda"))
