"""Batches of every kind, loaders in step, and batches too small to use."""

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
from cka.data.batches import first_samples, joined, map_tensors, samples_in
from cka.data.loaders import batches


def matrix(model, loader, **settings):
    return CKA(model, **settings).compare(loader, progress=False).matrix


Pair = namedtuple("Pair", ["images", "labels"])


@dataclass(frozen=True)
class Record:
    images: Tensor
    labels: Tensor


LABELS = torch.arange(8)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda x: (x, LABELS), id="tuple"),
        pytest.param(lambda x: [x, LABELS], id="list"),
        pytest.param(lambda x: Pair(x, LABELS), id="namedtuple"),
        pytest.param(lambda x: Record(x, LABELS), id="dataclass"),
        pytest.param(lambda x: ({"input": x}, LABELS), id="dict-in-tuple"),
        pytest.param(lambda x: {"input": x}, id="dict"),
        pytest.param(lambda x: x.double(), id="another-float-dtype"),
    ],
)
def test_the_input_is_found_in_a_batch(wrap):
    """Images with labels, however they are packed, are compared as the images alone."""
    data = batches_of(8, 8)
    assert torch.equal(matrix(mlp(), [wrap(x) for x in data]), matrix(mlp(), data))


class Masked(nn.Module):
    """Cannot run without its mask, and must not ignore it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.mask = nn.Identity()

    def forward(self, input_ids, attention_mask):
        return self.mask(self.fc(input_ids) * attention_mask)


def test_dicts_are_passed_whole():
    """The attention mask arrives, and changes the outcome."""
    torch.manual_seed(0)
    model, x = Masked(), batches_of(8)[0]
    ones = matrix(model, [{"input_ids": x, "attention_mask": torch.ones(8, 1)}])
    some = matrix(model, [{"input_ids": x, "attention_mask": (torch.arange(8) % 2)[:, None]}])
    assert ones[0, 1] == pytest.approx(1)
    assert some[0, 1] < 0.99


def test_a_function_of_ones_own_feeds_the_model():
    """feed(model, batch) gets the whole batch, also of types nobody knows."""

    class Odd:
        def __init__(self, x):
            self.x = x

    data = batches_of(8, 8)
    found = matrix(mlp(), [Odd(x) for x in data], feed=lambda model, batch: model(batch.x))
    assert torch.equal(found, matrix(mlp(), data))


def test_a_half_precision_model_gets_half_precision_inputs():
    """Float inputs follow the weights, so that a model and its half can share a loader."""
    data = batches_of(16, 16)
    model, half = mlp(), mlp().half()
    result = CKA(model, half).compare(data, progress=False)
    assert not result.matrix.isnan().any()
    assert result.matrix.diagonal().min() > 0.999


def test_large_half_precision_activations_do_not_overflow():
    """fp16 outputs of several hundred: the Gram matrix is float32, and right."""
    data = batches_of(16)[0]
    model = mlp().half()
    for one in (model[0], model[2]):
        one.weight.data *= 300
    with torch.no_grad():
        outputs = [model[0](data.half()), model(data.half())]
    assert outputs[0].abs().max() > 256
    found = matrix(model, [data], model1_layers=["0", "2"])
    assert float(found[0, 1]) == pytest.approx(minibatch_cka([outputs[0]], [outputs[1]]), abs=1e-6)


def test_two_loaders_feed_one_model_each():
    """The second loader's batches reach the second model only."""
    data = batches_of(8, 8)
    doubled = [2 * x for x in data]
    model = mlp()
    result = CKA(model, model).compare(data, doubled, progress=False)
    assert not result.self_comparison
    assert result.matrix[0, 0] < 1 - 1e-7 or result.matrix[1, 1] < 1 - 1e-7
    assert result.samples == 16


def test_the_same_loader_twice_is_read_once():
    """compare(loader, loader) with a shuffling loader gives both models the same samples."""
    loader = DataLoader(TensorDataset(batches_of(32)[0]), batch_size=8, shuffle=True)
    result = CKA(mlp(0), mlp(0)).compare(loader, loader, progress=False)
    torch.testing.assert_close(result.matrix.diagonal(), torch.ones(3))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        pytest.param((8, 8), (8, 7), "batch 1 has 8 samples in dataloader and 7", id="sizes"),
        pytest.param((8, 8), (8,), "dataloader2 ended after 1 batches", id="second-shorter"),
        pytest.param((8,), (8, 8), "dataloader ended after 1 batches", id="first-shorter"),
    ],
)
def test_loaders_that_disagree_are_refused(first, second, message):
    """A mismatch of samples is never compared."""
    with pytest.raises(InputError, match=message):
        CKA(mlp(0), mlp(1)).compare(batches_of(*first), batches_of(*second), progress=False)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_small_last_batch_joins_the_one_before(last):
    """Of a DataLoader and of a list of batches: every sample is used, and nothing is warned of."""
    data = batches_of(16 + last)[0]
    loader = DataLoader(TensorDataset(data, torch.zeros(len(data))), batch_size=8)
    expected = matrix(mlp(), [data[:8], data[8:]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CKA(mlp()).compare(loader, progress=False)
        listed = CKA(mlp()).compare(list(data.split(8)), progress=False)
    assert result.samples == listed.samples == 16 + last
    assert result.batches == 2
    torch.testing.assert_close(result.matrix, expected)
    torch.testing.assert_close(listed.matrix, expected)


def test_a_last_batch_of_four_stands_alone():
    """The boundary: four samples are a batch of their own."""
    result = CKA(mlp()).compare(batches_of(8, 4), progress=False)
    assert (result.samples, result.batches) == (12, 2)


def test_a_small_batch_that_cannot_be_joined_is_left_out():
    """From a generator the batch before is gone already: the rest of the work is kept."""
    with pytest.warns(CKAWarning, match="batches under 4 samples are left out, of sizes: 3"):
        result = CKA(mlp()).compare(iter(batches_of(8, 8, 3)), progress=False)
    assert (result.samples, result.batches) == (16, 2)
    assert torch.equal(result.matrix, matrix(mlp(), batches_of(8, 8)))


def test_a_small_batch_of_another_length_is_left_out():
    """It was held back to be joined, and cannot be: the one before it is used as it is."""
    long, short = torch.randn(8, 5, 6), torch.randn(3, 4, 6)
    with pytest.warns(CKAWarning, match="batches under 4 samples are left out, of sizes: 3"):
        result = CKA(mlp()).compare([long, short], progress=False)
    assert (result.samples, result.batches) == (8, 1)
    assert torch.equal(result.matrix, matrix(mlp(), [long]))


def test_a_small_batch_that_only_outputs_tell_is_left_out():
    """Of a text a model may make any number of samples."""

    def feed(model, text):
        return model(torch.ones(len(text), 6).tril())

    with pytest.warns(CKAWarning, match="batches under 4 samples are left out, of sizes: 3"):
        result = CKA(mlp(), feed=feed).compare(iter(["eight by", "six"]), progress=False)
    assert (result.samples, result.batches) == (8, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_of_nothing_but_padding_is_not_run(rank):
    """Nine samples over two ranks, in batches of one sample: the second rank's last is padding."""
    data = TensorDataset(torch.arange(9))
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=1, sampler=sampler)
    seen = [int(images) for ((images,),) in batches((loader,), 1)]
    assert seen == list(range(rank, 9, 2))


def test_a_batch_without_anything_in_it_is_refused():
    """There is no input in it, and the error says what a batch is."""
    with pytest.raises(InputError, match="got an empty batch; a batch is a tensor"):
        CKA(mlp()).compare([()], progress=False)


@pytest.mark.parametrize("sizes", [(), (3,), (1,)], ids=["empty", "three", "one"])
def test_no_usable_batch_is_an_error(sizes):
    """Nothing to compute from is said, with what would be enough."""
    with pytest.raises(InputError, match="no batch had at least 4 samples"):
        CKA(mlp()).compare(batches_of(*sizes), progress=False)


def test_the_biased_estimator_takes_two_samples():
    """Its own boundary."""
    result = CKA(mlp(), estimator="biased").compare(iter(batches_of(2, 2)), progress=False)
    assert result.samples == 4


def test_a_loader_is_looked_ahead_of_only_before_a_small_last_batch():
    """Holding a second batch costs memory, and is done once, when it is of use."""
    fetched = []

    class Source(torch.utils.data.Dataset):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def __getitem__(self, at):
            fetched.append(at)
            return torch.zeros(2)

    ahead = {}
    for size in (12, 13):
        fetched.clear()
        seen = []
        for (batch,) in batches((DataLoader(Source(size), batch_size=4),), 4):
            seen.append((len(batch), len(fetched)))
        ahead[size] = seen
    assert ahead == {12: [(4, 4), (4, 8), (4, 12)], 13: [(4, 4), (4, 8), (5, 13)]}


def test_an_input_changed_in_place_is_not_given_to_the_second_model():
    """Rather than comparing on two different inputs, the comparison is refused."""
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4))
    with pytest.raises(InputError, match="model1 changes its input in place"):
        CKA(first, mlp()).compare(batches_of(8), progress=False)


def test_two_models_must_see_the_same_number_of_samples():
    """Also where only the models' outputs tell."""
    halved = iter([0, 1])

    def feed(model, batch):
        return model(torch.randn(8 if next(halved) == 0 else 6, 6))

    with pytest.raises(InputError, match="given 8 and 6 samples"):
        CKA(mlp(0), mlp(1), feed=feed).compare(["text"], progress=False)


def test_batches_can_be_cut_and_joined_in_any_structure():
    """Cutting and joining are inverse for nested batches, lists of text included."""
    whole = {"x": torch.arange(6), "more": (torch.arange(12).view(6, 2),), "n": torch.tensor(3)}
    cut = first_samples(whole, 4)
    assert cut["x"].tolist() == [0, 1, 2, 3]
    assert cut["more"][0].shape == (4, 2)
    assert joined(["a"], ["b", "c"]) == ["a", "b", "c"]
    pair = joined(Pair(torch.zeros(2), torch.zeros(2, 3)), Pair(torch.ones(1), torch.ones(1, 3)))
    assert pair.images.tolist() == [0, 0, 1]
    record = map_tensors(Record(torch.zeros(2), torch.zeros(2)), lambda x: x + 1)
    assert record.labels.tolist() == [1, 1]
    assert first_samples(Pair(torch.arange(3), "text"), 2).images.tolist() == [0, 1]
    mapping = joined({"x": torch.zeros(2), "id": ["a"]}, {"id": ["b"], "x": torch.ones(1)})
    assert (mapping["x"].tolist(), mapping["id"]) == ([0, 0, 1], ["a", "b"])
    assert samples_in(["text"]) is None


def test_batches_of_different_shape_are_not_joined():
    """Sequences of different length cannot be one tensor."""
    with pytest.raises(InputError, match=r"\(2, 3\) and \(1, 4\) cannot be joined"):
        joined(torch.zeros(2, 3), torch.zeros(1, 4))
    with pytest.raises(InputError, match="cannot join a int and a int"):
        joined(1, 2)
