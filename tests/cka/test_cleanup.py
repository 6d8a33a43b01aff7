"""What a comparison changes, it puts back: hooks, modes, memory, the caller's settings."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from cka_nets import InPlace, Residual, batches_of, mlp
from torch import nn

from cka import CKA, CKAError, InputError
from cka.running.placement import device_for, eager, evaluating, placed, unwrap


def hooks_on(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def modes_of(model):
    return [module.training for module in model.modules()]


def half_frozen():
    """A model in training with one frozen part."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model.train()
    model[1].eval()
    return model


class BrokenError(RuntimeError):
    pass


def failing_loader(error):
    yield from batches_of(8, 8)
    raise error


def failing_pick(name, output):
    if name == "2":
        raise BrokenError("pick")
    return output


class FailingModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        self.fc(x)
        raise BrokenError("model")


@pytest.mark.parametrize(
    ("model", "loader", "settings", "error"),
    [
        pytest.param(half_frozen(), lambda: batches_of(8), {}, None, id="success"),
        pytest.param(
            half_frozen(), lambda: batches_of(8), {"pick": failing_pick}, BrokenError, id="hook"
        ),
        pytest.param(FailingModel(), lambda: batches_of(8), {}, BrokenError, id="model"),
        pytest.param(
            half_frozen(), lambda: failing_loader(BrokenError()), {}, BrokenError, id="loader"
        ),
        pytest.param(
            half_frozen(), lambda: failing_loader(KeyboardInterrupt()), {}, KeyboardInterrupt,
            id="ctrl-c",
        ),
        pytest.param(half_frozen(), lambda: batches_of(3), {}, InputError, id="no-batch"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", [True, False], ids=["with", "without"])
def test_hooks_come_off_and_modes_come_back_on_every_exit(model, loader, settings, error, block):
    """Every module's own flag, not just the root's, and whoever raised."""
    modes = modes_of(model)
    cka = CKA(model, **settings)
    try:
        if block:
            with cka:
                cka.compare(loader(), progress=False)
        else:
            cka.compare(loader(), progress=False)
    except BaseException as raised:
        found = type(raised)
    else:
        found = None
    assert found is error
    assert hooks_on(model) == 0
    assert modes_of(model) == modes


def test_models_run_in_evaluation_mode():
    """Dropout is off and batch norm keeps its statistics, in every submodule."""
    model = half_frozen()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (CKA(model).compare(batches_of(8), progress=False) for _ in range(2))
    assert torch.equal(first.matrix, second.matrix)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_one_model_in_training_and_one_frozen_each_keep_their_mode():
    """Two models, two modes, both put back."""
    training, frozen = mlp(0).train(), mlp(1).eval()
    CKA(training, frozen).compare(batches_of(8), progress=False)
    assert all(modes_of(training))
    assert not any(modes_of(frozen))


def test_hooks_are_on_only_while_the_model_runs():
    """A loader that uses the model itself is not recorded."""
    model = mlp()

    def loader():
        for batch in batches_of(8, 8):
            assert hooks_on(model) == 0
            yield model(batch).detach() @ torch.ones(5, 6) + batch

    result = CKA(model).compare(loader(), progress=False)
    assert result.model1_layers == ["0", "1", "2"]


def test_a_users_own_hooks_stay_and_are_respected():
    """A hook that replaces an output comes before ours, and is still there afterwards."""
    model = mlp()
    calls = []
    model[1].register_forward_hook(lambda module, args, out: calls.append(1) or torch.zeros(8, 8))
    with pytest.warns(UserWarning, match="same for every sample: 1"):
        result = CKA(model).compare(batches_of(8), progress=False)
    assert result.matrix[1].isnan().all()
    assert len(calls) == 1
    assert hooks_on(model) == 1


def live_tensors():
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("two", [False, True], ids=["self", "two-models"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_nothing_is_alive_afterwards_but_the_result(two):
    """Without the help of the garbage collector: two tensors are new, those of the result."""
    model, other, data = Residual(), Residual() if two else None, batches_of(8, 8)
    cka = CKA(model, other)
    cka.compare(data, progress=False)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        result = cka.compare(data, progress=False)
        assert live_tensors() - before == 2
    finally:
        gc.enable()
    assert result.matrix.untyped_storage().nbytes() == result.matrix.numel() * 4


def test_no_output_outlives_its_layer():
    """When a layer runs, the outputs of those before the one feeding it are gone."""
    alive = []

    class Watch(nn.Module):
        def forward(self, x):
            self.previous = [one for one in getattr(self, "previous", []) if one() is not None]
            alive.append(len(self.previous))
            out = x + 1
            self.previous.append(weakref.ref(out))
            return out

    watch = Watch()
    model = nn.Sequential(watch, watch, watch, watch)
    layers = [lambda name, module: isinstance(module, Watch)]
    CKA(model, model1_layers=layers).compare(batches_of(8, 8), progress=False)
    assert max(alive) == 1


def test_no_batch_outlives_its_step():
    """While a batch runs, the ones before it are gone."""
    seen, alive = [], []

    def loader():
        for _ in range(4):
            batch = torch.randn(8, 6)
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    model = mlp()
    model.register_forward_pre_hook(lambda *_: alive.append(sum(one() is not None for one in seen)))
    CKA(model).compare(loader(), progress=True)
    assert alive == [1, 1, 1, 1]


def test_the_with_block_lets_go_of_the_models():
    """The name a with block binds outlives it; the weights need not."""
    model = mlp()
    weights = weakref.ref(model)
    with CKA(model) as cka:
        cka.compare(batches_of(8), progress=False)
    del model
    assert weights() is None
    with pytest.raises(CKAError, match="ended with its with block"):
        cka.compare(batches_of(8), progress=False)


def test_without_a_block_compare_can_be_repeated():
    """The same object gives the same result again, with nothing carried over."""
    cka = CKA(mlp())
    first = cka.compare(batches_of(8), progress=False)
    second = cka.compare(batches_of(8), progress=False)
    assert torch.equal(first.matrix, second.matrix)
    assert second.samples == 8


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(mode):
    """Inference mode included: same numbers, and ordinary tensors in the result."""
    model, data = InPlace(), batches_of(8, features=(2, 6, 6))
    expected = CKA(model).compare(data, progress=False)
    with mode():
        result = CKA(model).compare(data, progress=False)
    torch.testing.assert_close(result.matrix, expected.matrix)
    assert not result.matrix.is_inference()
    assert not result.matrix.requires_grad


def test_autocast_reaches_the_model_but_not_the_gram_matrices():
    """Under autocast outputs are bfloat16; their comparison is not."""
    data = batches_of(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = CKA(mlp(), kernel=lambda rows: rows @ rows.T).compare(data, progress=False)
    assert result.matrix.dtype == torch.float32
    torch.testing.assert_close(result.matrix.diagonal(), torch.ones(3))


def test_wrapped_models_are_looked_through():
    """DataParallel and compiled models give the rows of the network inside."""
    model, data = mlp(), batches_of(8)
    expected = CKA(model).compare(data, progress=False)
    for wrapped in (
        nn.DataParallel(model),
        torch.compile(model),
        nn.DataParallel(torch.compile(model)),
    ):
        result = CKA(wrapped).compare(data, progress=False)
        assert result.model1_layers == expected.model1_layers
        assert torch.equal(result.matrix, expected.matrix)
        assert unwrap(wrapped) is model
    both = CKA(nn.DataParallel(model), model).compare(data, progress=False)
    assert both.self_comparison


def test_compiled_parts_run_uncompiled():
    """model.compile() and a compiled submodule still call the hooks."""
    inner = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")
    model = nn.Sequential(inner, nn.Linear(6, 3))
    model.compile(backend="eager")
    model(batches_of(8)[0])  # compiled before the hooks come
    result = CKA(model).compare(batches_of(8), progress=False)
    assert "0._orig_mod.1" in result.model1_layers
    assert "1" in result.model1_layers


def test_parts_count_as_compiled_where_torch_does_not_tell(monkeypatch):
    """It has no public name for it; uncompiled is slower, but no hook stays silent."""
    monkeypatch.delattr(nn.Module, "_compiled_call_impl")
    context = eager([nn.Linear(6, 3)])
    with context:
        assert not isinstance(context, nullcontext)
    monkeypatch.undo()
    assert isinstance(eager([nn.Linear(6, 3)]), nullcontext)


def test_modes_of_a_module_in_two_models_are_restored():
    """A shared backbone gets back the mode it had."""
    shared = nn.Linear(6, 6)
    one, other = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())
    shared.training = False
    CKA(one, other).compare(batches_of(8), progress=False)
    assert not shared.training
    with evaluating([one, other]):
        assert not any(modes_of(one) + modes_of(other))
    assert one.training


def test_shared_modules_are_recorded_for_the_model_that_runs():
    """Two models with one backbone do not record each other's passes."""
    shared = nn.Linear(6, 6)
    one, other = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared)
    result = CKA(one, other).compare(batches_of(8), progress=False)
    assert (result.model1_layers, result.model2_layers) == (["0", "1"], ["0", "1"])
    assert result.matrix[0, 1] < 1


class Movable(nn.Module):
    """Has one weight, which is where it was last moved to."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def parameters(self, recurse=True):
        yield type("Weight", (), {"device": (self.moves or [torch.device("cpu")])[-1]})()

    def to(self, device):
        self.moves.append(device)


def test_a_model_is_moved_for_the_time_of_a_comparison():
    """It comes back to the very device it was on, also after an error."""
    model = Movable()
    away, home = torch.device("cuda", 1), torch.device("cpu")
    with pytest.raises(BrokenError), placed(model, away):
        raise BrokenError
    assert model.moves == [away, home]


def test_a_model_that_is_there_already_is_not_moved():
    """Nothing is copied for nothing."""
    model = Movable()
    with placed(model, torch.device("cpu")):
        assert model.moves == []
    assert model.moves == []


def test_devices_are_chosen_by_where_a_model_is():
    """An explicit device wins; on a machine without an accelerator the CPU is left."""
    cpu = torch.device("cpu")
    assert device_for(mlp(), cpu, "model1") == cpu
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert device_for(mlp(), None, "model1").type == (accelerator.type if accelerator else "cpu")


class Spread(nn.Module):
    """Claims weights on two devices."""

    def parameters(self, recurse=True):
        yield torch.zeros(1)
        yield type("Elsewhere", (), {"device": torch.device("cuda", 1)})()


def test_a_spread_model_runs_as_it_is_or_is_refused():
    """Asked onto one device, the error says where it is and what to do."""
    assert device_for(Spread(), None, "model1") == torch.device("cpu")
    with pytest.raises(InputError, match=r"model1 is spread over cpu, cuda:1; leave device out"):
        device_for(Spread(), torch.device("cpu"), "model1")
