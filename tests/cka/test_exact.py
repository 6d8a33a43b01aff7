"""The exact estimator: one estimate from the Gram matrices of all samples; and settings."""

from __future__ import annotations

import re

import pytest
import torch
from cka_nets import Aliases, batches_of, mlp
from cka_reference import cloned_outputs
from torch.utils.data import DataLoader, TensorDataset

from cka import (
    CKA,
    CKAWarning,
    DoesNotFitError,
    InputError,
    LayerError,
    SettingError,
    cka_from_features,
    functional,
)
from cka.running.exact import available_bytes
from pytest_cka_memory import MemoryProbe


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_exact_result_equals_cka_of_the_features_of_all_samples(kernel):
    """The exact estimate uses batches of any size, even of one sample."""
    model, batches = mlp().eval(), batches_of(8, 8, 3, 1)
    outputs = {name: torch.cat(parts) for name, parts in cloned_outputs(model, batches).items()}
    result = CKA(model, estimator="exact", kernel=kernel).compare(batches, progress=False)
    expected = cka_from_features(list(outputs.values()), list(outputs.values()), kernel=kernel)
    assert (result.matrix.double() - expected).abs().max() < 1e-6
    assert (result.samples, result.batches, result.estimator) == (20, 4, "exact")
    assert result.standard_error.isnan().all()


def test_exact_result_of_two_models_uses_the_features_of_each():
    """In the exact result, rows are features of the first model, columns those of the second."""
    one, two, batches = mlp(0).eval(), mlp(1).eval(), batches_of(8, 8)
    result = CKA(one, two, estimator="exact").compare(batches, progress=False)
    first, second = cloned_outputs(one, batches), cloned_outputs(two, batches)
    expected = cka_from_features(torch.cat(first["1"]), torch.cat(second["2"]))
    assert float(result.matrix[1, 2]) == pytest.approx(float(expected), abs=1e-6)


def test_exact_result_does_not_depend_on_the_batch_size():
    """The exact estimate is the same for the same samples in larger and smaller batches."""
    data = batches_of(24)[0]
    results = [
        CKA(mlp(), estimator="exact").compare(list(data.split(size)), progress=False).matrix
        for size in (24, 7)
    ]
    torch.testing.assert_close(*results)


def needed(samples):
    """Return the bytes that the exact estimator needs for mlp().

    It has 8 + 8 + 5 float32 features per sample, and a copy of the widest layer's 8. Each of the
    three layers has a Gram matrix, and five copies of one are needed while it is computed.
    """
    return 4 * (samples * (21 + 8) + (3 + 5) * samples**2)


@pytest.mark.parametrize("spare", [0, -1], ids=["equal", "one-byte-short"])
def test_error_gives_the_bytes_needed_if_memory_is_too_small(spare, count_passes):
    """Memory of the exact size suffices; one byte less is an error before the second batch runs."""
    loader = DataLoader(TensorDataset(batches_of(32)[0]), batch_size=8)
    model = mlp()
    passes = count_passes(model)
    cka = CKA(model, estimator="exact", memory_limit_bytes=needed(32) + spare)
    if spare == 0:
        assert cka.compare(loader, progress=False).samples == 32
        return
    message = rf"needs 0\.03 MB \({needed(32)} bytes\) for 32 samples of 3 layers, but only"
    with pytest.raises(DoesNotFitError, match=message):
        cka.compare(loader, progress=False)
    assert passes == [2, 8]  # two samples show the axes


@pytest.mark.native
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize(("samples", "width"), [(1200, 1200), (400, 40_000)])
def test_bytes_given_in_the_error_are_enough(kernel, samples, width):
    """The bytes that an error asks for suffice, for large Gram matrices and for wide features."""
    model = torch.nn.Sequential(torch.nn.Linear(8, width))
    batches = batches_of(samples, features=(8,))
    settings = {"estimator": "exact", "kernel": kernel, "device": "cpu"}
    with pytest.raises(DoesNotFitError) as error:
        CKA(model, memory_limit_bytes=1, **settings).compare(batches, progress=False)
    needed_bytes = int(re.search(r"needs .* MB \((\d+) bytes\) for", str(error.value)).group(1))
    probe = MemoryProbe("cpu")
    with probe.measure() as region:
        CKA(model, memory_limit_bytes=needed_bytes, **settings).compare(batches, progress=False)
    # The bytes include the working space of the compiled kernel; operators of torch need less.
    compiled = functional._vector_floats() > 0
    at_least = needed_bytes / (2 if compiled else 3)
    assert at_least < region.peak_increase_bytes <= needed_bytes


def test_loader_without_a_length_fails_when_its_samples_no_longer_fit():
    """A loader without a length fails at the batch that no longer fits, with the bytes needed so
    far.
    """
    cka = CKA(mlp(), estimator="exact", memory_limit_bytes=needed(16))
    with pytest.raises(DoesNotFitError, match=rf"\({needed(24)} bytes\) for 24 samples"):
        cka.compare(iter(batches_of(8, 8, 8)), progress=False)


def test_output_returned_by_several_modules_is_stored_once():
    """The features and Gram matrix of an output of several modules
    count once in the bytes needed.
    """
    cka = CKA(Aliases(), estimator="exact", memory_limit_bytes=1)
    with pytest.raises(DoesNotFitError, match="8 samples of 2 layers"):
        cka.compare(batches_of(8), progress=False)


def test_available_memory_includes_the_stored_features():
    """Memory of stored features is used already, and it is part of what the estimator needs."""
    free = available_bytes(0)
    assert free is None or available_bytes(2**40) >= 2**40


def test_there_is_no_limit_if_the_free_memory_is_unknown(monkeypatch):
    """If ``sysconf`` raises, as on macOS, the free memory is unknown
    and the comparison still runs.
    """

    def sysconf(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", sysconf)
    assert CKA(mlp(), estimator="exact").compare(batches_of(8), progress=False).samples == 8


class EverySecond(torch.nn.Module):
    """One layer runs in every second batch only, before the layer that always runs."""

    def __init__(self, first):
        super().__init__()
        self.sometimes = torch.nn.Linear(6, 3)
        self.always = torch.nn.Linear(6, 4)
        self.runs = not first

    def forward(self, x):
        self.runs = not self.runs
        if self.runs:
            self.sometimes(x)
        return self.always(x)


@pytest.mark.parametrize("first", [True, False], ids=["in-the-first", "not-in-the-first"])
def test_layer_that_is_missing_from_a_batch_is_left_out_with_a_warning(first):
    """A layer that is missing from a batch does not change the results of the other layers."""
    batches = batches_of(8, 8, 8)
    model = EverySecond(first)
    with pytest.warns(CKAWarning, match="not run in every batch: sometimes$"):
        result = CKA(model, estimator="exact").compare(batches, progress=False)
    assert result.model1_layers == ["always"]
    assert result["always", "always"] == 1
    assert result.samples == 24


class Tokens(torch.nn.Module):
    """A layer with features for each token, then one with features for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Linear(6, 4)
        self.sample = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.sample(self.token(x).mean(1))


def test_layer_of_varying_width_is_left_out_with_a_warning():
    """Batches of texts differ in tokens, so layers of varying width are left out unless pooled."""
    model, batches = Tokens(), [torch.randn(8, tokens, 6) for tokens in (5, 7, 5)]
    with pytest.warns(CKAWarning, match=r'pooling="mean".*"unbiased"\): token$'):
        result = CKA(model, estimator="exact").compare(batches, progress=False)
    assert result.model1_layers == ["sample"]
    outputs = torch.cat(cloned_outputs(model, batches)["sample"])
    pooled = CKA(model, estimator="exact", pooling="mean").compare(batches, progress=False)
    assert pooled.model1_layers == ["token", "sample"]
    tokens = torch.cat([model.token(one).mean(1) for one in batches]).detach()
    expected = cka_from_features(tokens, outputs)
    assert pooled["token", "sample"] == pytest.approx(float(expected), abs=1e-6)


def test_error_says_why_if_every_layer_has_varying_width():
    """If every layer varies in width, the error says so; features are freed at the first such
    batch.
    """
    batches = [torch.randn(8, tokens, 6) for tokens in (5, 7)]
    with pytest.raises(LayerError, match=r"no layer is left to compare.*left out because .*token"):
        CKA(Tokens(), Tokens(), "token", "token", estimator="exact").compare(
            batches, progress=False
        )


def test_fewer_than_four_samples_are_an_error():
    """Fewer than four samples are an error, because the unbiased
    estimate does not exist for them.
    """
    with pytest.raises(InputError, match="3 samples are too few; pass at least 4 samples"):
        CKA(mlp(), estimator="exact").compare(batches_of(2, 1), progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"estimator": "debiased"}, "'debiased' as an estimator; write", id="name"),
        pytest.param(
            {"estimator": "exact", "hsic_batch_size": 64},
            "got hsic_batch_size=64; omit hsic",
            id="parts",
        ),
        pytest.param({"hsic_batch_size": 3}, "at least 4, got 3; write", id="small-parts"),
        pytest.param({"kernel": 3}, "cannot use 3 as a kernel; write", id="kernel"),
    ],
)
def test_invalid_setting_is_an_error(settings, message):
    """An invalid setting is refused when the CKA is created, and the error names a valid value."""
    with pytest.raises(SettingError, match=message):
        CKA(mlp(), **settings)
