"""Tests of computed values in any form: layouts, types, sparse and nested tensors, subclasses.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from values_on_both import on_both

HALF = torch.float16, torch.bfloat16


def test_ordinary_assertions_hold():
    """The usual assertions of a user's GPU test hold on the emulated device."""
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
    """Strided, expanded, transposed, channels-last and overlapping tensors keep their layout."""
    x = torch.randn(4, 3, 6, 6)
    on_both(lambda t: t.transpose(1, 2)[::2, 1:, ::3] * 2, x)
    on_both(lambda t: t.to(memory_format=torch.channels_last).mul(3).contiguous(), x)
    on_both(lambda t: t[:, :1].expand(4, 5, 6, 6).sum(1), x)
    on_both(lambda t: t.flatten().unfold(0, 8, 3).cumsum(1), x)
    target = torch.zeros(10, device="cuda")
    target[::2].copy_(torch.arange(5.0))
    assert target.tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0]


def test_number_is_copied_into_a_tensor():
    """``copy_`` accepts a number, in every precision, also below autograd."""
    target = torch.zeros(2, device="cuda", dtype=torch.int64)
    assert target.copy_(2**40 + 1).tolist() == [2**40 + 1] * 2
    result = torch.zeros(2, device="cuda", requires_grad=True) * 2
    assert result.copy_(2.5).tolist() == [2.5, 2.5]


def test_results_are_written_in_place_and_into_out():
    """Results are written in place, into lists, and into ``out``, which may have to grow."""
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
    """Comparisons, conversions and numbers in place of tensors have the types of the CPU."""
    x = torch.arange(6).reshape(2, 3).to(dtype)
    on_both(lambda t: (t + 1, t * 2.5, t.to(torch.float32) if not t.is_complex() else t, t == 1), x)


def test_float8_and_views_of_bits_are_converted():
    """Float8 and views of bits have no arithmetic, but copies convert them."""
    x = torch.randn(5)
    on_both(lambda t: t.to(torch.float8_e4m3fn).float(), x)
    on_both(lambda t: t.view(torch.int32) >> 3, x)


def test_kernels_that_torch_launches_outside_of_cuda_operators_are_computed():
    """Kernels such as ``ldexp``, which some versions of torch do not register for CUDA, compute."""
    on_both(torch.ldexp, torch.rand(3), torch.arange(3))
    on_both(lambda t, e: t.clone().ldexp_(e), torch.rand(3), torch.arange(3))


def test_conjugate_and_negative_views_are_read():
    """Conjugate and negative views, which share memory with their base, are read correctly."""
    x = torch.randn(3, 3, dtype=torch.complex64)
    on_both(lambda t: (t.conj() @ t, t.conj().imag + 1, t.mH.resolve_conj()), x)


def test_empty_tensors_are_accepted():
    """Empty tensors, whose values have no address, are accepted."""
    on_both(lambda t: (t + 1, t.sum(), t @ t.T, torch.cat([t, t])), torch.ones(0, 4))


def test_sparse_tensors_have_values():
    """Sparse tensors of the formats COO and CSR have values."""
    x = torch.tensor([[0.0, 2, 0], [1, 0, 3]])
    on_both(lambda t: t.to_sparse().mul(2).to_dense(), x)
    on_both(lambda t: t.to_sparse_csr() @ torch.ones(3, 2, device=t.device), x)
    summed = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), device="cuda").coalesce()
    assert (summed.values().tolist(), summed.indices().tolist()) == ([3.0], [[0]])


def test_jagged_tensors_have_values():
    """Jagged tensors, a subclass of tensors around one buffer, have values."""
    parts = [torch.ones(2, 3, device="cuda"), torch.ones(1, 3, device="cuda")]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    assert (nested * 2).values().sum().item() == 18


def test_strided_nested_tensors_have_values():
    """Strided nested tensors have values and gradients, by their
    buffer or by kernels of their own.
    """

    def attend(nested):
        heads = nested.unsqueeze(1)
        if torch._fused_sdp_choice(heads, heads, heads) == SDPBackend.EFFICIENT_ATTENTION.value:
            # PyTorch 2.13.0, also on a card: it has no backward kernel of this form.
            assert torch.__version__.startswith("2.13.0")
            output = F.scaled_dot_product_attention(heads, heads, heads)
            with pytest.raises(NotImplementedError, match="efficient_attention_backward"):
                torch.autograd.grad(output.contiguous().values().sum(), nested)
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)

    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    layer, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    found = []
    for device in ("cpu", "cuda"):
        layer, norm = layer.to(device), norm.to(device)
        leaves = [part.to(device).requires_grad_() for part in parts]
        nested = norm(layer(torch.nested.as_nested_tensor(leaves))).relu() * 2
        padded = (attend(nested) + nested).to_padded_tensor(-1.0)
        gradients = torch.autograd.grad(padded.square().sum(), leaves)
        rows = nested.transpose(1, 2).contiguous().unbind()
        found.append([value.detach().cpu() for value in (padded, *gradients, *rows)])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backends", [[*SDPBackend.__members__.values()], [SDPBackend.MATH]])
@pytest.mark.parametrize("longest", [4, 8])
def test_nested_tensors_inside_a_transformer_leave_out_padding(backends, longest):
    """A transformer turns padded batches into nested tensors, if the mask is one of padding.

    PyTorch asks the device for that. The plain form pads positions to a multiple of 8 on CUDA;
    PyTorch before 2.12 chooses it by itself for heads of this size.
    """
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, longest, 8)
    padding = torch.arange(longest) >= torch.tensor([[longest], [2]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with sdpa_kernel(backends):
            found = model.cuda()(x.cuda(), src_key_padding_mask=padding.cuda()).cpu()
    assert found[1, 2:].count_nonzero() == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["tensor", "channel", "dynamic"])
def test_quantized_tensors_have_values(kind):
    """Quantized tensors with one scale, one per channel or one chosen by values have values."""

    def quantized(values):
        if kind == "tensor":
            return torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
        if kind == "dynamic":
            return torch.quantize_per_tensor_dynamic(values, torch.qint8, False)
        scales = torch.tensor([0.1, 0.2], device=values.device)
        zeros = torch.tensor([0, 1], device=values.device)
        return torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)

    def described(values):
        own = quantized(values)
        one = own.clone() if kind == "channel" else own[:, 1:].relu()
        return own.int_repr(), own.dequantize(), one.dequantize()

    x = torch.linspace(-1, 1, 8).view(2, 4)
    on_both(described, x)
    assert torch.equal(quantized(x).cuda().cpu().int_repr(), quantized(x).int_repr())
    assert torch.equal(quantized(x.cuda()).cpu().int_repr(), quantized(x).int_repr())


def test_product_of_quantized_tensors_is_refused_by_name_with_a_way_out():
    """A product of quantized tensors, which is cuDNN's work, is
    refused with advice to dequantize.
    """
    x, w = (torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8) for _ in range(2))
    packed = torch.ops.quantized.linear_prepack(w.cuda(), None)
    for call in (
        lambda: torch.ops.quantized.linear(x.cuda(), packed, 0.1, 0),
        lambda: torch.ops.quantized.add(x.cuda(), x.cuda(), 0.1, 0),
    ):
        with pytest.raises(RuntimeError, match=r"quantized::\w+ is not supported .* dequantize"):
            call()


def test_tensor_subclasses_have_values():
    """Operators on the tensor inside a wrapper subclass are computed."""
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
    """Lazy parameters, whose shape raises until they have one, are loaded and materialized."""
    layer = nn.LazyLinear(2).cuda()
    layer.load_state_dict(nn.LazyLinear(2).cuda().state_dict())
    assert layer(torch.ones(3, 4, device="cuda")).isfinite().all()
