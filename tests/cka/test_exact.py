"""The exact estimator: one estimate over the Gram matrices of all samples."""

from __future__ import annotations

import re

import pytest
import torch
from cka_nets import Aliases, batches_of, mlp
from cka_reference import cloned_outputs
from torch.utils.data import DataLoader, TensorDataset

from cka import CKA, DoesNotFitError, InputError, SettingError, cka_from_features
from cka.running.estimators import available_bytes
from pytest_cka_memory import MemoryProbe


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_exact_is_cka_of_all_features_at_once(kernel):
    """Batches of any size, the smallest included, are one data set."""
    model, batches = mlp().eval(), batches_of(8, 8, 3, 1)
    outputs = {name: torch.cat(parts) for name, parts in cloned_outputs(model, batches).items()}
    result = CKA(model, estimator="exact", kernel=kernel).compare(batches, progress=False)
    expected = cka_from_features(list(outputs.values()), list(outputs.values()), kernel=kernel)
    assert (result.matrix.double() - expected).abs().max() < 1e-6
    assert (result.samples, result.batches, result.estimator) == (20, 4, "exact")
    assert result.standard_error.isnan().all()


def test_exact_of_two_models():
    """Each side by its own features."""
    one, two, batches = mlp(0).eval(), mlp(1).eval(), batches_of(8, 8)
    result = CKA(one, two, estimator="exact").compare(batches, progress=False)
    first, second = cloned_outputs(one, batches), cloned_outputs(two, batches)
    expected = cka_from_features(torch.cat(first["1"]), torch.cat(second["2"]))
    assert float(result.matrix[1, 2]) == pytest.approx(float(expected), abs=1e-6)


def test_the_batch_size_does_not_matter():
    """The same samples in other batches give the same matrix."""
    data = batches_of(24)[0]
    results = [
        CKA(mlp(), estimator="exact").compare(list(data.split(size)), progress=False).matrix
        for size in (24, 7)
    ]
    torch.testing.assert_close(*results)


# mlp() gives 8 + 8 + 5 float32 features a sample, the widest layer 8, over three layers; beside
# their Gram matrices there is room for five copies of one.
def needed(samples):
    return 4 * (samples * (21 + 8) + (3 + 5) * samples**2)


@pytest.mark.parametrize("spare", [0, -1], ids=["equal", "one-byte-short"])
def test_too_little_memory_is_refused_with_the_bytes_needed(spare):
    """Exactly enough is enough; a byte less is refused before the second batch is run."""
    loader = DataLoader(TensorDataset(batches_of(32)[0]), batch_size=8)
    model, passes = mlp(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    cka = CKA(model, estimator="exact", memory_limit_bytes=needed(32) + spare)
    if spare == 0:
        assert cka.compare(loader, progress=False).samples == 32
        return
    with pytest.raises(DoesNotFitError, match=rf"needs {needed(32)} bytes .* for 32 samples of 3"):
        cka.compare(loader, progress=False)
    assert len(passes) == 1


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize(("samples", "width"), [(1200, 1200), (400, 40_000)])
def test_what_is_said_to_be_needed_is_enough(kernel, samples, width):
    """Gram matrices as large as the features, and features of several pieces."""
    model = torch.nn.Sequential(torch.nn.Linear(8, width))
    batches = batches_of(samples, features=(8,))
    settings = {"estimator": "exact", "kernel": kernel}
    with pytest.raises(DoesNotFitError) as refused:
        CKA(model, memory_limit_bytes=1, **settings).compare(batches, progress=False)
    said = int(re.search(r"needs (\d+) bytes", str(refused.value)).group(1))
    probe = MemoryProbe("cpu")
    with probe.measure() as region:
        CKA(model, memory_limit_bytes=said, **settings).compare(batches, progress=False)
    assert said / 2 < region.peak_increase_bytes <= said


def test_a_loader_without_length_is_refused_when_it_no_longer_fits():
    """Then the bytes needed grow with what was seen."""
    cka = CKA(mlp(), estimator="exact", memory_limit_bytes=needed(16))
    with pytest.raises(DoesNotFitError, match=rf"needs {needed(24)} bytes"):
        cka.compare(iter(batches_of(8, 8, 8)), progress=False)


def test_outputs_handed_on_are_stored_once():
    """Aliases share features and Gram matrix, and the bytes needed say so."""
    cka = CKA(Aliases(), estimator="exact", memory_limit_bytes=1)
    with pytest.raises(DoesNotFitError, match="8 samples of 2 layers"):
        cka.compare(batches_of(8), progress=False)


def test_free_memory_includes_what_is_held_already():
    """The limit by default, where the system tells."""
    free = available_bytes(0)
    assert free is None or available_bytes(2**40) >= 2**40


def test_where_free_memory_is_not_told_there_is_no_limit(monkeypatch):
    """As on macOS, whose ``sysconf`` has no such name: the comparison runs all the same."""

    def sysconf(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", sysconf)
    assert CKA(mlp(), estimator="exact").compare(batches_of(8), progress=False).samples == 8


def test_exact_needs_four_samples():
    """Fewer leave nothing to estimate from."""
    with pytest.raises(InputError, match="no batch had at least"):
        CKA(mlp(), estimator="exact").compare(batches_of(2, 1), progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"estimator": "debiased"}, "'debiased' as an estimator; write", id="name"),
        pytest.param(
            {"estimator": "exact", "hsic_batch_size": 64}, "all samples at once", id="parts"
        ),
        pytest.param({"hsic_batch_size": 3}, "at least 4, got 3", id="small-parts"),
        pytest.param({"kernel": 3}, "cannot use 3 as a kernel", id="kernel"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    """At construction, with what to write instead."""
    with pytest.raises(SettingError, match=message):
        CKA(mlp(), **settings)
