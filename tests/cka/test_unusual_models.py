"""Models that run in unusual ways: fused encoders, scripted models, unusual dtypes."""

from __future__ import annotations

import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import minibatch_cka
from torch import Tensor, nn

from cka import CKA, CKAWarning, InputError


@pytest.fixture
def encoder() -> nn.TransformerEncoder:
    """Return a small encoder in evaluation mode, for which torch would take its fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def padded_batches() -> list[dict[str, Tensor]]:
    """Return two batches of six sequences, of which the later tokens are padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 3, 4, 2, 5, 4])
    padding = torch.arange(5) >= lengths[:, None]
    return [
        {"src": torch.randn(6, 5, 8, generator=generator), "src_key_padding_mask": padding}
        for _ in range(2)
    ]


def test_encoder_with_a_padding_mask_runs_module_by_module(encoder):
    """On the fast path an encoder's layers return nested tensors, so it is turned off."""
    with pytest.warns(
        CKAWarning, match="left out because they never ran: layers.0.self_attn.out_proj"
    ):
        result = CKA(encoder).compare(padded_batches(), progress=False)
    assert "layers.0" in result.model1_layers
    assert "layers.1.linear1" in result.model1_layers
    assert not result.matrix.isnan().any()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_fast_path_is_restored_however_the_block_ended(encoder, enabled, fails):
    """The fast path is a setting of the process, so it is restored however a block ends."""
    mha = torch.backends.mha
    seen = []

    def pick(name, output):
        seen.append(mha.get_fastpath_enabled())
        if fails:
            raise KeyboardInterrupt
        return output

    mha.set_fastpath_enabled(enabled)
    try:
        cka = CKA(encoder, model1_layers="layers.*", pick=pick)
        if fails:
            with pytest.raises(KeyboardInterrupt):
                cka.compare(padded_batches(), progress=False)
        else:
            cka.compare(padded_batches(), progress=False)
        assert mha.get_fastpath_enabled() is enabled
    finally:
        mha.set_fastpath_enabled(True)
    assert set(seen) == {False}


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(torch.jit.script, id="scripted"),
        pytest.param(lambda model: torch.jit.trace(model, torch.zeros(4, 6)), id="traced"),
        pytest.param(lambda model: nn.DataParallel(torch.jit.script(model)), id="wrapped"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_or_traced_model_is_an_error(compiled):
    """A scripted or traced model is an error, because torch.jit runs no hooks of inner layers."""
    with pytest.raises(InputError, match=r"model2 is a scripted or traced model \(.*; pass the nn"):
        CKA(mlp(), compiled(mlp().eval()))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_part_of_a_model_is_left_out_with_a_warning():
    """A scripted part of a model is left out, and the layers around it are compared."""
    model = nn.Sequential(nn.Linear(6, 6), torch.jit.script(mlp()), nn.Tanh())
    with pytest.warns(
        CKAWarning, match=r"because they are scripted or traced.*: 1, 1\.0, 1\.1, 1\.2$"
    ):
        result = CKA(model).compare(batches_of(8), progress=False)
    assert result.model1_layers == ["0", "2"]


class Converted(nn.Module):
    """A layer whose output has the dtype or form that a function gives it."""

    def __init__(self, convert):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 5)
        self.converted = nn.Identity()
        self.convert = convert

    def forward(self, x):
        out = self.fc(x)
        self.converted(self.convert(out))
        return out


@pytest.mark.parametrize(
    ("convert", "read"),
    [
        pytest.param(
            lambda x: torch.complex(x, x.square()).conj(),
            lambda z: torch.cat([z.real, z.imag], 1),
            id="conjugated",
        ),
        pytest.param(lambda x: x.to(torch.float8_e5m2), Tensor.double, id="float8"),
        pytest.param(lambda x: (8 * x).to(torch.int64), Tensor.double, id="int64"),
        pytest.param(lambda x: (8 * x).abs().to(torch.uint16), Tensor.double, id="uint16"),
        pytest.param(
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            Tensor.dequantize,
            id="quantised",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("estimator", ["unbiased", "exact"])
def test_outputs_of_unusual_dtypes_are_compared_by_their_values(convert, read, estimator):
    """The result for outputs of unusual dtypes is that of their values in float64."""
    model, (batch,) = Converted(convert).eval(), batches_of(12)
    result = CKA(model, estimator=estimator).compare([batch], progress=False)
    with torch.no_grad():
        plain = model.fc(batch)
    expected = minibatch_cka([plain], [read(convert(plain))])
    assert result["fc", "converted"] == pytest.approx(expected, abs=1e-6)
