"""Batches of every structure, two data loaders, and batches that are too small."""

from __future__ import annotations

import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from cka_nets import batches_of, mlp
from cka_reference import minibatch_cka
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cka import CKA, CKAWarning, InputError
from cka.capture.outputs import map_tensors
from cka.data import Counting, batch_tuples, concatenate_batches
from cka.samples import SampleRule


def matrix(model, loader, **settings):
    return CKA(model, **settings).compare(loader, progress=False).matrix


Pair = namedtuple("Pair", ["images", "labels"])


@dataclass(frozen=True)
class Record:
    images: Tensor
    labels: Tensor


LABELS = torch.arange(8)
COUNTING = Counting(SampleRule())


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda x: (x, LABELS), id="tuple"),
        pytest.param(lambda x: [x, LABELS], id="list"),
        pytest.param(lambda x: Pair(x, LABELS), id="namedtuple"),
        pytest.param(lambda x: Record(x, LABELS), id="dataclass"),
        pytest.param(lambda x: ({"input": x}, LABELS), id="dict-in-tuple"),
        pytest.param(lambda x: {"input": x}, id="dict"),
    ],
)
def test_input_of_the_model_is_taken_from_a_batch(wrap):
    """Images with labels, in any structure, give the result of the images alone."""
    data = batches_of(8, 8)
    assert torch.equal(matrix(mlp(), [wrap(x) for x in data]), matrix(mlp(), data))


class Masked(nn.Module):
    """A model with a required second input that changes its output."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.mask = nn.Identity()

    def forward(self, input_ids, attention_mask):
        return self.mask(self.fc(input_ids) * attention_mask)


def test_all_entries_of_a_dict_are_passed_to_the_model():
    """A dict is passed to the model with all its entries: an attention mask changes the result."""
    torch.manual_seed(0)
    model, x = Masked(), batches_of(8)[0]
    ones = matrix(model, [{"input_ids": x, "attention_mask": torch.ones(8, 1)}])
    some = matrix(model, [{"input_ids": x, "attention_mask": (torch.arange(8) % 2)[:, None]}])
    assert ones[0, 1] == pytest.approx(1)
    assert some[0, 1] < 0.99


def test_feed_runs_the_model_on_batches_of_any_type():
    """feed(model, batch) gets the whole batch, which may be of any type."""

    class CustomBatch:
        def __init__(self, x):
            self.x = x

    data = batches_of(8, 8)
    batches = [CustomBatch(x) for x in data]
    found = matrix(mlp(), batches, device="cpu", feed=lambda model, batch: model(batch.x))
    assert torch.equal(found, matrix(mlp(), data, device="cpu"))


def test_cast_inputs_have_the_dtype_of_the_weights():
    """With cast_inputs=True a model and its half can share a loader; else no input is changed."""
    data = batches_of(16, 16)
    model, half = mlp(), mlp().half()
    with pytest.raises(InputError, match=r"are torch\.float16, but .*: torch\.float32\); pass"):
        CKA(model, half).compare(data, progress=False)
    result = CKA(model, half, cast_inputs=True).compare(data, progress=False)
    assert not result.matrix.isnan().any()
    assert result.matrix.diagonal().min() > 0.999


def test_large_half_precision_activations_do_not_overflow():
    """The Gram matrix of float16 outputs of several hundred is computed in float32."""
    data = batches_of(16)[0]
    model = mlp().half()
    for one in (model[0], model[2]):
        one.weight.data *= 300
    with torch.no_grad():
        outputs = [model[0](data.half()), model(data.half())]
    assert outputs[0].abs().max() > 256
    found = matrix(model, [data], model1_layers=["0", "2"], cast_inputs=True)
    assert float(found[0, 1]) == pytest.approx(minibatch_cka([outputs[0]], [outputs[1]]), abs=1e-6)


def test_each_of_two_loaders_is_used_for_its_model():
    """The batches of the second loader are inputs of the second model only."""
    data = batches_of(8, 8)
    doubled = [2 * x for x in data]
    model = mlp()
    result = CKA(model, model).compare(data, doubled, progress=False)
    assert not result.self_comparison
    assert result.matrix[0, 0] < 1 - 1e-7 or result.matrix[1, 1] < 1 - 1e-7
    assert result.samples == 16


def test_same_loader_for_both_models_is_iterated_once():
    """With compare(loader, loader), a shuffling loader gives both models the same samples."""
    loader = DataLoader(TensorDataset(batches_of(32)[0]), batch_size=8, shuffle=True)
    result = CKA(mlp(0), mlp(0)).compare(loader, loader, progress=False)
    torch.testing.assert_close(result.matrix.diagonal(), torch.ones(3))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        pytest.param(
            (8, 8),
            (8, 7),
            "batch 1 has 8 samples in dataloader and 7 in dataloader2; pass",
            id="sizes",
        ),
        pytest.param((8, 8), (8,), "dataloader2 ended after 1 batches, but", id="second-shorter"),
        pytest.param((8,), (8, 8), "dataloader ended after 1 batches, but", id="first-shorter"),
    ],
)
def test_loaders_with_different_batches_are_an_error(first, second, message):
    """Two loaders whose batches differ give outputs for different samples, which is an error."""
    with pytest.raises(InputError, match=message):
        CKA(mlp(0), mlp(1)).compare(batches_of(*first), batches_of(*second), progress=False)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_small_last_batch_is_added_to_the_one_before(last):
    """A small last batch is added to the one before, so every sample is used without a warning."""
    data = batches_of(16 + last)[0]
    loader = DataLoader(TensorDataset(data, torch.zeros(len(data))), batch_size=8)
    expected = matrix(mlp(), [data[:8], data[8:]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CKA(mlp()).compare(loader, progress=False)
        from_list = CKA(mlp()).compare(list(data.split(8)), progress=False)
    assert result.samples == from_list.samples == 16 + last
    assert result.batches == 2
    torch.testing.assert_close(result.matrix, expected)
    torch.testing.assert_close(from_list.matrix, expected)


def test_last_batch_of_four_samples_is_not_added_to_the_one_before():
    """A last batch of four samples is enough for an unbiased estimate, so it is used by itself."""
    result = CKA(mlp()).compare(batches_of(8, 4), progress=False)
    assert (result.samples, result.batches) == (12, 2)


def test_small_batch_of_a_generator_is_left_out_with_a_warning():
    """The batch before a generator's small one is gone, so the small batch is left out."""
    with pytest.warns(
        CKAWarning,
        match="fewer than 4 samples are left out; their numbers of samples: 3",
    ):
        result = CKA(mlp()).compare(iter(batches_of(8, 8, 3)), progress=False)
    assert (result.samples, result.batches) == (16, 2)
    assert torch.equal(result.matrix, matrix(mlp(), batches_of(8, 8)))


def test_small_batch_of_another_shape_is_left_out_with_a_warning():
    """A small last batch of another shape is left out, because it cannot be concatenated."""
    long, short = torch.randn(8, 5, 6), torch.randn(3, 4, 6)
    with pytest.warns(
        CKAWarning,
        match="fewer than 4 samples are left out; their numbers of samples: 3",
    ):
        result = CKA(mlp()).compare([long, short], progress=False)
    assert (result.samples, result.batches) == (8, 1)
    assert torch.equal(result.matrix, matrix(mlp(), [long]))


def test_small_batch_is_left_out_if_only_outputs_show_its_size():
    """A batch of text shows only by its outputs how small it is, and is then left out."""

    def feed(model, text):
        return model(torch.ones(len(text), 6).tril())

    cka = CKA(mlp(), feed=feed, device="cpu")
    with pytest.warns(
        CKAWarning,
        match="fewer than 4 samples are left out; their numbers of samples: 3",
    ):
        result = cka.compare(iter(["eight by", "six"]), progress=False)
    assert (result.samples, result.batches) == (8, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_batch_of_padding_samples_only_is_dropped(rank):
    """A batch of padding alone is dropped: of nine samples on two ranks, the second's last one."""
    data = TensorDataset(torch.arange(9))
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=1, sampler=sampler)
    seen = [int(images) for ((images,),) in batch_tuples((loader,), 1, COUNTING)]
    assert seen == list(range(rank, 9, 2))


def test_empty_tuple_as_batch_is_an_error():
    """The error for an empty tuple as a batch says what to yield."""
    with pytest.raises(InputError, match=r"loader yielded an empty batch, \(\); yield a tensor"):
        CKA(mlp()).compare([()], progress=False)


@pytest.mark.parametrize("sizes", [(), (3,), (1,)], ids=["empty", "three", "one"])
def test_loader_without_a_large_enough_batch_is_an_error(sizes):
    """If no batch of a loader is large enough, the error gives the smallest size that is."""
    with pytest.raises(InputError, match="no batch had at least 4 samples"):
        CKA(mlp()).compare(batches_of(*sizes), progress=False)


def test_biased_estimator_uses_batches_of_two_samples():
    """The biased estimator uses batches of 2 samples, while the unbiased one needs 4."""
    result = CKA(mlp(), estimator="biased").compare(iter(batches_of(2, 2)), progress=False)
    assert result.samples == 4


def test_next_batch_is_fetched_early_only_before_a_small_last_batch():
    """A second batch costs memory, so it is fetched early only when both are concatenated."""
    fetched = []

    class Source(torch.utils.data.Dataset):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def __getitem__(self, at):
            fetched.append(at)
            return torch.zeros(2)

    seen_and_fetched = {}
    for size in (12, 13):
        fetched.clear()
        seen = []
        for (batch,) in batch_tuples((DataLoader(Source(size), batch_size=4),), 4, COUNTING):
            seen.append((len(batch), len(fetched)))
        seen_and_fetched[size] = seen
    assert seen_and_fetched == {
        12: [(4, 4), (4, 8), (4, 12)],
        13: [(4, 4), (4, 8), (5, 13)],
    }


def test_input_changed_in_place_by_the_first_model_is_an_error():
    """If the first model changes a batch in place, the second one would get a different input."""
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4))
    with pytest.raises(InputError, match="model1 changes its input in place"):
        CKA(first, mlp(), device="cpu").compare(batches_of(8), progress=False)


def test_different_sample_counts_of_two_models_are_an_error():
    """If two models return different numbers of samples for a batch of text, it is an error."""
    first, second = mlp(0), mlp(1)

    def feed(model, batch):
        return model(torch.randn(8 if model is first else 6, 6))

    with pytest.raises(InputError, match="outputs for 8 and 6 samples of one batch; run both"):
        CKA(first, second, feed=feed, device="cpu").compare(["text"], progress=False)


def test_batches_of_any_structure_are_cut_and_concatenated():
    """Mappings, sequences, named tuples, dataclasses and lists of text are cut and concatenated."""
    whole = {"x": torch.arange(6), "more": (torch.arange(12).view(6, 2),), "n": torch.tensor(3)}
    rule = SampleRule()
    cut = rule.first(whole, 4, 6)
    assert cut["x"].tolist() == [0, 1, 2, 3]
    assert cut["more"][0].shape == (4, 2)
    assert concatenate_batches(["a"], ["b", "c"]) == ["a", "b", "c"]
    pair = concatenate_batches(
        Pair(torch.zeros(2), torch.zeros(2, 3)), Pair(torch.ones(1), torch.ones(1, 3))
    )
    assert pair.images.tolist() == [0, 0, 1]
    record = map_tensors(Record(torch.zeros(2), torch.zeros(2)), lambda x: x + 1)
    assert record.labels.tolist() == [1, 1]
    assert rule.first(Pair(torch.arange(3), "text"), 2, 3).images.tolist() == [0, 1]
    mapping = concatenate_batches(
        {"x": torch.zeros(2), "id": ["a"]}, {"id": ["b"], "x": torch.ones(1)}
    )
    assert (mapping["x"].tolist(), mapping["id"]) == ([0, 0, 1], ["a", "b"])
    assert rule.count(["text"], of_feed=False) is None


def test_concatenating_batches_that_differ_in_shape_is_an_error():
    """Batches that differ in shape, and objects that are not batches, cannot be concatenated."""
    with pytest.raises(InputError, match=r"tensors of shape \(2, 3\) and \(1, 4\); they may"):
        concatenate_batches(torch.zeros(2, 3), torch.zeros(1, 4))
    with pytest.raises(InputError, match="cannot concatenate batches of type int and int; both"):
        concatenate_batches(1, 2)
