"""Tests of computed values on two emulated cards.

``test_on_device.py`` runs them in a new process.
"""

from pytest_cka_memory.emulated import loading

MB = 2**20
loading.load("a100", devices=2)

import copy  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import threading  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pytest_cka_memory.emulated.values import activation, operators, staleness  # noqa: E402
from pytest_cka_memory.errors import DeviceAssertError, StaleValueError  # noqa: E402

HALF = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    """Start each test with the same random numbers, and without stale values."""
    torch.manual_seed(0)
    staleness.forget()
    yield
    staleness.forget()


def on_both(function, *tensors: torch.Tensor, tolerance: float = 1e-5, gradients: bool = False):
    """Assert that a function gives the same on the CPU and on the device."""
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.detach().clone().to(device) for tensor in tensors]
        for leaf in leaves:
            leaf.requires_grad_(gradients and leaf.is_floating_point())
        output = function(*leaves)
        found = list(output) if isinstance(output, (tuple, list)) else [output]
        if gradients:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            total = sum(value.float().square().sum() for value in found)
            found += torch.autograd.grad(total, wanted)
        assert all(value.device.type == device for value in found)
        results.append([value.detach().cpu() for value in found])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ---- Results of any form ----


def test_ordinary_assertions_hold():
    """What a GPU test of a user's asserts."""
    model = nn.Linear(8, 1).cuda()
    x = torch.randn(16, 8, device="cuda")
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    assert torch.isfinite(loss)
    assert loss.item() > 0
    assert (model.weight.grad != 0).all()
    assert torch.allclose(x.softmax(1).sum(1), torch.ones(16, device="cuda"))
    assert x[x > 0].numel() + x[x <= 0].numel() == x.numel()
    assert sorted(torch.randperm(9, device="cuda").tolist()) == list(range(9))
    assert "tensor([1.5000, 2.0000], device='cuda:0')" in repr(torch.tensor([1.5, 2.0]).cuda())


def test_memory_layouts_are_kept():
    """Strided, expanded, transposed, channels-last and overlapping tensors."""
    x = torch.randn(4, 3, 6, 6)
    on_both(lambda t: t.transpose(1, 2)[::2, 1:, ::3] * 2, x)
    on_both(lambda t: t.to(memory_format=torch.channels_last).mul(3).contiguous(), x)
    on_both(lambda t: t[:, :1].expand(4, 5, 6, 6).sum(1), x)
    on_both(lambda t: t.flatten().unfold(0, 8, 3).cumsum(1), x)
    target = torch.zeros(10, device="cuda")
    target[::2].copy_(torch.arange(5.0))
    assert target.tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0]


def test_results_are_written_in_place_and_into_out():
    """Also where ``out`` has to grow, and in lists."""
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 2, out=out)
    assert out.tolist() == [3, 3, 3]
    values = [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]
    torch._foreach_mul_(values, 5)
    assert [value.tolist() for value in values] == [[5, 5], [5, 5, 5]]
    assert values[0].clamp_(max=2).tolist() == [2, 2]
    found = torch.empty(0, dtype=torch.long, device="cuda")
    torch.nonzero(torch.tensor([0, 1, 1]).cuda(), out=found)
    assert found.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float64, torch.complex64, *HALF]
)
def test_types_are_kept(dtype):
    """Comparisons, conversions and numbers in place of tensors."""
    x = torch.arange(6).reshape(2, 3).to(dtype)
    on_both(lambda t: (t + 1, t * 2.5, t.to(torch.float32) if not t.is_complex() else t, t == 1), x)


def test_float8_and_views_of_bits_are_converted():
    """They have no arithmetic; copies convert."""
    x = torch.randn(5)
    on_both(lambda t: t.to(torch.float8_e4m3fn).float(), x)
    on_both(lambda t: t.view(torch.int32) >> 3, x)


def test_conjugate_and_negative_views_are_read():
    """They share memory with their base."""
    x = torch.randn(3, 3, dtype=torch.complex64)
    on_both(lambda t: (t.conj() @ t, t.conj().imag + 1, t.mH.resolve_conj()), x)


def test_empty_tensors_are_accepted():
    """No address has their values."""
    on_both(lambda t: (t + 1, t.sum(), t @ t.T, torch.cat([t, t])), torch.ones(0, 4))


def test_sparse_tensors_have_values():
    """COO and CSR."""
    x = torch.tensor([[0.0, 2, 0], [1, 0, 3]])
    on_both(lambda t: t.to_sparse().mul(2).to_dense(), x)
    on_both(lambda t: t.to_sparse_csr() @ torch.ones(3, 2, device=t.device), x)
    summed = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), device="cuda").coalesce()
    assert (summed.values().tolist(), summed.indices().tolist()) == ([3.0], [[0]])


def test_jagged_tensors_have_values():
    """They are a tensor subclass around one buffer."""
    parts = [torch.ones(2, 3, device="cuda"), torch.ones(1, 3, device="cuda")]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    assert (nested * 2).values().sum().item() == 18


def test_tensor_subclasses_have_values():
    """Of those that wrap a tensor, the operators on the inner one are computed."""
    from torch.utils._python_dispatch import return_and_correct_aliasing  # noqa: F401
    from torch.utils._pytree import tree_map

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            bare = tree_map(lambda a: a.inner if isinstance(a, Wrapped) else a, (args, kwargs))
            return tree_map(
                lambda r: Wrapped(r) if isinstance(r, torch.Tensor) else r,
                func(*bare[0], **(bare[1] or {})),
            )

    wrapped = Wrapped(torch.ones(3, device="cuda")) * 2 + 1
    assert wrapped.inner.tolist() == [3, 3, 3]
    assert (nn.Parameter(torch.ones(2, device="cuda")) + 1).tolist() == [2, 2]


def test_lazy_parameters_are_loaded_and_materialized():
    """Their shape raises as long as they have none."""
    layer = nn.LazyLinear(2).cuda()
    layer.load_state_dict(nn.LazyLinear(2).cuda().state_dict())
    assert layer(torch.ones(3, 4, device="cuda")).isfinite().all()


# ---- Operators that only CUDA has ----


def test_convolutions_and_their_gradients_are_the_cpus():
    """Of cuDNN: with groups, dilation, transposed, depthwise."""
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
    """Of cuDNN and of torch, with the running statistics."""
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


def test_parts_of_synchronized_batch_normalization_are_its_plain_form():
    """They run on the data of one process each."""
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
    """Layer, group and RMS, with gradients."""
    x, weight = torch.randn(4, 6, 5), torch.rand(5)
    on_both(lambda a, w: F.layer_norm(a, (5,), w), x, weight, gradients=True, tolerance=1e-4)
    on_both(lambda a: F.group_norm(a, 3), x, gradients=True, tolerance=1e-4)
    on_both(lambda a, w: F.rms_norm(a, (5,), w), x, weight, gradients=True, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "short"])
def test_attention_and_its_gradients_are_the_cpus(dtype, case):
    """Memory-efficient in single precision, flash in half precision without a mask."""
    q, k, v = (torch.randn(2, 4, 16, 32, dtype=dtype) for _ in range(3))
    mask = torch.randn(2, 1, 16, 16, dtype=dtype)
    if case == "short":
        k, v, mask = k[:, :, :8], v[:, :, :8], mask[..., :8]

    def attend(q, k, v, mask):
        chosen = mask if case in ("mask", "short") else mask.sum() * 0 + mask
        kwargs = {"attn_mask": chosen} if case in ("mask", "short") else {}
        result = F.scaled_dot_product_attention(q, k, v, is_causal=case == "causal", **kwargs)
        return result if kwargs else (result, mask)

    low = dtype == torch.bfloat16
    on_both(attend, q, k, v, mask, gradients=True, tolerance=5e-2 if low else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_drops_the_same_elements_in_its_backward_pass(dtype):
    """The gradient of v times v is the sum of the output, with the same mask."""
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=dtype, device="cuda") for _ in range(3))
    v.requires_grad_()
    output = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    total, again = (gradient.float() * v.float()).sum().item(), output.float().sum().item()
    assert total == pytest.approx(again, rel=0.1, abs=0.3)
    plain = F.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(output, plain)


def test_varying_lengths_in_attention_are_separate_sequences():
    """The flash form for sequences one behind the other."""
    q = torch.randn(5, 2, 16, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
    flash = torch.ops.aten._flash_attention_forward
    output = flash(q, q, q, starts, starts, 3, 3, 0.0, False, False)[0]
    for first, last in ((0, 2), (2, 5)):
        part = q[first:last].transpose(0, 1)[None].float()
        expected = F.scaled_dot_product_attention(part, part, part)[0].transpose(0, 1)
        torch.testing.assert_close(output[first:last].float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
def test_recurrent_layers_and_their_gradients_are_the_cpus(kind, options):
    """CuDNN's form, in one buffer of weights."""
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
    """Fused kernels on CUDA."""
    cell = kind(4, 5)
    on_device = copy.deepcopy(cell).cuda()
    x = torch.randn(3, 4)
    for one, values in ((cell, x), (on_device, x.cuda())):
        found = one(values)
        (found[0] if isinstance(found, tuple) else found).square().sum().backward()
    for one, other in zip(cell.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


def test_recurrent_layer_drops_the_same_elements_in_its_backward_pass():
    """The same seed gives the same output and the same gradients."""
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
    """Of cuDNN, or with other internal results than on the CPU."""
    image, grid = torch.randn(1, 2, 5, 5), torch.rand(1, 3, 3, 2) * 2 - 1
    on_both(
        lambda i, g: F.grid_sample(i, g, align_corners=True), image, grid, gradients=True,
        tolerance=1e-4,
    )  # fmt: skip
    on_both(lambda t: F.affine_grid(t, (2, 1, 3, 3), align_corners=True), torch.randn(2, 2, 3))
    on_both(F.logsigmoid, torch.randn(7), gradients=True)
    table = torch.randn(9, 4)
    for mode in ("sum", "mean", "max"):
        indices, starts = torch.tensor([1, 1, 5, 8]), torch.tensor([0, 2])
        on_both(lambda w, i, s, m=mode: F.embedding_bag(i, w, s, mode=m), table, indices, starts)
    logits = torch.randn(6, 2, 5).log_softmax(2)
    on_both(
        lambda t: F.ctc_loss(t, torch.tensor([[1, 2], [3, 3]]).to(t.device), (6, 5), (2, 1)), logits
    )


def test_products_with_another_result_type_are_the_cpus():
    """``out_dtype`` exists on CUDA only."""
    a = torch.randn(4, 4).bfloat16()
    found = torch.mm(a.cuda(), a.cuda(), out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu(), a.float() @ a.float())


def test_optimizers_take_the_cpus_steps():
    """Foreach and fused implementations work on lists."""
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


# ---- Sizes that depend on values ----


def test_sizes_that_depend_on_values_are_the_cpus():
    """The operator on the device reads the computed size back."""
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
        lambda t: torch.histc(t.float(), 4),
        lambda t: t.clone().index_put_((t > 1,), t[t > 1] * 2),
        lambda t: torch.argwhere(t),
    ):
        on_both(function, x)


def test_selected_elements_have_their_memory():
    """Without values the result is empty, and so is its memory."""
    x = torch.randn(MB, device="cuda")
    wanted = int((x.cpu() > 0).sum()) * 4
    gc.collect()
    before = torch.cuda.memory_allocated()
    selected = x[x > 0]
    allocated = torch.cuda.memory_allocated() - before
    assert selected.numel() * 4 == wanted
    assert wanted <= allocated < wanted + 1024


# ---- What the library cannot run ----


def test_libraries_that_are_not_there_have_the_cpus_results():
    """cuSOLVER, cuFFT and cuSPARSE."""
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


# ---- Random numbers ----


def test_random_numbers_repeat_with_the_generator_of_the_device():
    """By seed, by state, and by a generator of the user's."""
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(5, device="cuda")
    second = F.dropout(torch.ones(20, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), first)
    assert torch.equal(F.dropout(torch.ones(20, device="cuda")), second)
    assert not torch.equal(torch.randn(5, device="cuda"), first)
    own = [torch.Generator("cuda").manual_seed(7) for _ in range(2)]
    one, other = (torch.rand(5, device="cuda", generator=generator) for generator in own)
    assert torch.equal(one, other)


def test_random_numbers_do_not_change_those_of_the_cpu():
    """The two have generators of their own."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    F.dropout(torch.ones(20, device="cuda"))
    torch.randperm(100, device="cuda")
    assert torch.equal(torch.rand(3), expected)


# ---- Never stale ----


def test_read_of_a_value_that_was_not_computed_raises_and_names_the_operator():
    """Also of what was computed from it, but not of what replaces it."""
    weight = torch.zeros(64, 64, dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(weight, 2)
    derived = packed + 1
    for read in (
        lambda: packed.cpu(),
        lambda: derived.sum().item(),
        lambda: derived[derived > 0],
        lambda: repr(derived),
        lambda: torch.equal(derived, derived),
    ):
        with pytest.raises(StaleValueError, match="aten::_convert_weight_to_int4pack"):
            read()
    derived.zero_()
    assert derived.sum().item() == 0
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_read_after_an_unknown_kernel_raises_and_names_it():
    """It may have written anything that was there; later results are known."""
    before = torch.ones(4, device="cuda")
    library = ctypes.CDLL("libcuda.so.1")
    function = ctypes.c_void_p()
    library.cuModuleGetFunction(ctypes.byref(function), None, b"my_kernel")
    assert library.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == 0
    with pytest.raises(StaleValueError, match=r"the kernel my_kernel was launched outside"):
        before.cpu()
    with pytest.raises(StaleValueError, match="my_kernel"):
        (before * 2).sum().item()
    assert torch.ones(3, device="cuda").sum().item() == 3
    before.fill_(2)
    assert before.tolist() == [2, 2, 2, 2]


# ---- Errors ----


def test_index_out_of_range_raises_at_once():
    """On a card it is an assert of the kernel, which is reported later."""
    x = torch.zeros(3, device="cuda")
    for use in (
        lambda: x[torch.tensor([5], device="cuda")],
        lambda: x.gather(0, torch.tensor([5], device="cuda")),
        lambda: F.embedding(torch.tensor([7], device="cuda"), torch.ones(3, 2, device="cuda")),
        lambda: F.cross_entropy(x[None], torch.tensor([9], device="cuda")),
    ):
        with pytest.raises(DeviceAssertError, match="On a card this is a device-side assert"):
            use()
    assert issubclass(DeviceAssertError, IndexError)
    assert issubclass(DeviceAssertError, RuntimeError)


def test_tensors_on_two_devices_are_refused():
    """As on a card."""
    for other in (torch.ones(2), torch.ones(2, device="cuda:1")):
        with pytest.raises(RuntimeError, match="on the same device"):
            torch.ones(2, device="cuda") + other


def test_failed_operators_keep_nothing():
    """An error that is kept in a frame would keep the arguments."""
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


# ---- Threads and transforms ----


def test_values_are_computed_in_every_thread():
    """In threads of the user's, and in torch's backward threads."""
    found = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            found.append((threading.current_thread().name, (gradient * 3).sum().item()))
            return gradient * 2

    def work():
        leaf = torch.ones(3, device="cuda", requires_grad=True)
        Doubled.apply(leaf).sum().backward()
        found.append(("", leaf.grad.sum().item()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [value for _, value in found] == [9.0, 6.0]


def test_transforms_give_the_cpus_results():
    """``torch.func`` and checkpointing, which run operators in other contexts."""
    x = torch.randn(4, 3)
    on_both(lambda t: torch.func.vmap(torch.func.grad(lambda r: r.sin().sum()))(t), x)
    on_both(lambda t: torch.func.jacrev(lambda r: r.square().cumsum(0))(t[0]), x)
    on_both(lambda t: torch.func.jvp(lambda r: r.exp(), (t,), (t,)), x)
    on_both(lambda t: checkpoint(lambda r: r.tanh() * 2, t, use_reentrant=False), x, gradients=True)
    leaf = x.cuda().requires_grad_()
    checkpoint(lambda r: r.tanh() * 2, leaf, use_reentrant=True).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), 2 - 2 * x.tanh().square())


def test_modes_of_the_user_and_the_meter_see_operators_once():
    """No mode sees the operators that compute values."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with Names():
        total = (leaf * 2).sum()
        total.backward()
        assert total.item() == 6
    assert seen.count("aten.mul.Tensor") == 2
    assert not any("as_strided" in name for name in seen)
    with torch.device("cuda"):
        assert (torch.ones(2) + torch.arange(2)).tolist() == [1, 2]


def test_autocast_and_gradient_scaling_work():
    """Values of half precision, and the scale that infinite gradients reduce."""
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**4)
    before = model.weight.detach().clone()
    with torch.autocast("cuda"):
        loss = model(torch.ones(2, 4, device="cuda")).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    model.weight.grad.fill_(float("inf"))
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**3


def test_library_with_its_own_operators_is_computed():
    """Torchvision is imported after the device was loaded."""
    torchvision = pytest.importorskip("torchvision")
    boxes = torch.rand(20, 4) * 10
    boxes[:, 2:] += boxes[:, :2]
    on_both(lambda b: torchvision.ops.nms(b, b[:, 0], 0.3), boxes)
    on_both(lambda b: torchvision.ops.box_iou(b, b), boxes)
    image, regions = torch.rand(1, 2, 16, 16), torch.tensor([[0.0, 0, 0, 8, 8]])
    on_both(lambda i, r: torchvision.ops.roi_align(i, r, 4), image, regions)


def test_operators_of_the_user_in_python_compute_what_they_call():
    """Also if a library is loaded after they were defined."""

    @torch.library.custom_op("emulated_tests::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    activation.register_new_operators()
    assert twice(torch.ones(3, device="cuda")).tolist() == [2, 2, 2]


# ---- Memory ----


def test_no_alias_is_found_among_live_tensors():
    """The CPU meter would count the storage of all addresses."""
    (torch.ones(3, device="cuda") + 1).sum().item()
    gc.collect()
    sizes = [
        value.untyped_storage().nbytes()
        for value in gc.get_objects()
        if type(value) is torch.Tensor and value.device.type == "cpu"
    ]
    assert max(sizes, default=0) < 2**40


def test_zeros_take_no_memory_of_the_machine():
    """Large zero tensors are not committed."""
    before = resident_bytes()
    kept = torch.zeros(512 * MB, dtype=torch.uint8, device="cuda")
    assert resident_bytes() - before < 64 * MB
    assert kept[::MB].sum().item() == 0


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def test_library_reads_answers_in_order_and_forgets_them():
    """Numbers that an operator did not read must not reach the next one."""
    library = operators.library()
    library.announce(5)
    library.forget_answers()
    assert torch.nonzero(torch.tensor([0, 1], device="cuda")).tolist() == [[1]]
