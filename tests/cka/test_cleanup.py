"""A comparison restores hooks, modes, devices and memory, and works in any grad mode."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from cka_nets import InPlace, Residual, batches_of, mlp
from torch import nn

from cka import CKA, CKAError, InputError
from cka.running.placement import device_for, eager, evaluation_mode, moved_to, unwrap


def hooks_on(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def modes_of(model):
    return [module.training for module in model.modules()]


def half_frozen():
    """A model in training mode with one submodule in evaluation mode."""
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
def test_hooks_are_removed_and_modes_restored_on_every_exit(model, loader, settings, error, block):
    """Every module gets its mode back, and no hook stays, whatever has raised."""
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
    """In a comparison dropout is inactive and batch norm keeps its
    statistics, in each submodule.
    """
    model = half_frozen()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (CKA(model).compare(batches_of(8), progress=False) for _ in range(2))
    assert torch.equal(first.matrix, second.matrix)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_two_models_in_different_modes_get_their_own_mode_back():
    """A model in training mode and one in evaluation mode both get their own mode back."""
    training, frozen = mlp(0).train(), mlp(1).eval()
    CKA(training, frozen).compare(batches_of(8), progress=False)
    assert all(modes_of(training))
    assert not any(modes_of(frozen))


def test_hooks_are_registered_only_during_a_forward_pass():
    """Forward passes that a loader runs with the model itself are not recorded."""
    model = mlp()

    def loader():
        for batch in batches_of(8, 8):
            assert hooks_on(model) == 0
            yield model(batch).detach() @ torch.ones(5, 6) + batch

    result = CKA(model, device="cpu").compare(loader(), progress=False)
    assert result.model1_layers == ["0", "1", "2"]


def test_hook_of_the_user_stays_and_its_output_is_compared():
    """A user's hook that replaces an output runs first, and is still registered afterwards."""
    model = mlp()
    calls = []
    model[1].register_forward_hook(lambda module, args, out: calls.append(1) or out * 0)
    with pytest.warns(UserWarning, match="same for every sample: 1"):
        result = CKA(model, device="cpu").compare(batches_of(8), progress=False)
    assert result.matrix[1].isnan().all()
    assert len(calls) == 2  # with the run that shows the axes
    assert hooks_on(model) == 1


def live_tensors():
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("two", [False, True], ids=["self", "two-models"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_only_the_result_is_live_after_a_comparison(two):
    """After a comparison, without a garbage collection, only the result's two tensors are new."""
    model, other, data = Residual(), Residual() if two else None, batches_of(8, 8)
    cka = CKA(model, other)
    cka.compare(data, progress=False)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        result = cka.compare(data, progress=False)
        assert live_tensors() - before == 2 + 11  # the matrices, and sums in one storage
    finally:
        gc.enable()
    assert result.matrix.untyped_storage().nbytes() == result.matrix.numel() * 4


def test_output_is_freed_once_the_next_layer_has_run():
    """When a layer runs, only the output that is its input is still live."""
    live = []

    class AddOne(nn.Module):
        def forward(self, x):
            self.previous = [one for one in getattr(self, "previous", []) if one() is not None]
            live.append(len(self.previous))
            out = x + 1
            self.previous.append(weakref.ref(out))
            return out

    layer = AddOne()
    model = nn.Sequential(layer, layer, layer, layer)
    layers = [lambda name, module: isinstance(module, AddOne)]
    CKA(model, model1_layers=layers).compare(batches_of(8, 8), progress=False)
    assert max(live) == 1


def test_batch_is_freed_before_the_next_one_runs():
    """While a batch runs, no earlier batch is live."""
    batches, live = [], []

    def loader():
        for _ in range(4):
            batch = torch.randn(8, 6)
            batches.append(weakref.ref(batch))
            yield batch
            del batch

    model = mlp()
    model.register_forward_pre_hook(
        lambda *_: live.append(sum(one() is not None for one in batches))
    )
    CKA(model).compare(loader(), progress=True)
    assert live == [1, 1, 1, 1, 1]  # two of the first batch run first


def test_models_are_not_referenced_after_the_with_block():
    """After its with block, the CKA object does not keep the weights of the models alive."""
    model = mlp()
    weights = weakref.ref(model)
    with CKA(model) as cka:
        cka.compare(batches_of(8), progress=False)
    del model
    assert weights() is None
    with pytest.raises(CKAError, match="after the with block of this CKA ended; call it inside"):
        cka.compare(batches_of(8), progress=False)


def test_compare_can_be_repeated_without_a_with_block():
    """A second comparison has an equal result and counts its own samples only."""
    cka = CKA(mlp())
    first = cka.compare(batches_of(8), progress=False)
    second = cka.compare(batches_of(8), progress=False)
    assert torch.equal(first.matrix, second.matrix)
    assert second.samples == 8


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_result_does_not_depend_on_the_grad_mode_of_the_caller(mode):
    """In any grad mode of the caller, values are the same and the result's tensors ordinary."""
    model, data = InPlace(), batches_of(8, features=(2, 6, 6))
    expected = CKA(model).compare(data, progress=False)
    with mode():
        result = CKA(model).compare(data, progress=False)
    torch.testing.assert_close(result.matrix, expected.matrix)
    assert not result.matrix.is_inference()
    assert not result.matrix.requires_grad


def test_autocast_applies_to_the_model_but_not_to_gram_matrices():
    """Under autocast, outputs are bfloat16 and their Gram matrices are float32."""
    data = batches_of(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = CKA(mlp(), kernel=lambda rows: rows @ rows.T).compare(data, progress=False)
    assert result.matrix.dtype == torch.float32
    torch.testing.assert_close(result.matrix.diagonal(), torch.ones(3))


@pytest.mark.slow
def test_wrapped_model_gives_the_result_of_the_network_inside():
    """A model in DataParallel, torch.compile or both gives the result of the network inside."""
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


def test_hooks_of_compiled_submodules_are_called():
    """model.compile() and a compiled submodule run uncompiled during a comparison."""
    inner = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")
    model = nn.Sequential(inner, nn.Linear(6, 3))
    model.compile(backend="eager")
    model(batches_of(8)[0])  # compiles before hooks are registered
    result = CKA(model).compare(batches_of(8), progress=False)
    assert "0._orig_mod.1" in result.model1_layers
    assert "1" in result.model1_layers


def test_submodules_count_as_compiled_if_torch_lacks_the_private_attribute(monkeypatch):
    """Without torch's private attribute, submodules run
    uncompiled: slower, but hooks are called.
    """
    monkeypatch.delattr(nn.Module, "_compiled_call_impl")
    context = eager([nn.Linear(6, 3)])
    with context:
        assert not isinstance(context, nullcontext)
    monkeypatch.undo()
    assert isinstance(eager([nn.Linear(6, 3)]), nullcontext)


def test_mode_of_a_module_in_two_models_is_restored():
    """A backbone that two models share gets the mode that it had before."""
    shared = nn.Linear(6, 6)
    one, other = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())
    shared.training = False
    CKA(one, other).compare(batches_of(8), progress=False)
    assert not shared.training
    with evaluation_mode([one, other]):
        assert not any(modes_of(one) + modes_of(other))
    assert one.training


def test_shared_module_is_recorded_only_for_the_model_that_runs():
    """Two models with one backbone do not record each other's forward passes."""
    shared = nn.Linear(6, 6)
    one, other = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared)
    result = CKA(one, other).compare(batches_of(8), progress=False)
    assert (result.model1_layers, result.model2_layers) == (["0", "1"], ["0", "1"])
    assert result.matrix[0, 1] < 1


class Movable(nn.Module):
    """Has one weight on the device to which it was last moved."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def parameters(self, recurse=True):
        yield type("Weight", (), {"device": (self.moves or [torch.device("cpu")])[-1]})()

    def to(self, device):
        self.moves.append(device)


def test_model_is_moved_back_after_an_error():
    """A model is moved to the device for a comparison, and moved back also after an error."""
    model = Movable()
    away, home = torch.device("cuda", 1), torch.device("cpu")
    with pytest.raises(BrokenError), moved_to(model, away):
        raise BrokenError
    assert model.moves == [away, home]


def test_model_that_is_on_the_device_already_is_not_moved():
    """The method ``to`` of a model that is on the device already is not called."""
    model = Movable()
    with moved_to(model, torch.device("cpu")):
        assert model.moves == []
    assert model.moves == []


def test_device_is_the_given_one_or_the_accelerator_or_the_cpu():
    """For a model on the CPU, a given device has priority over the accelerator."""
    cpu = torch.device("cpu")
    assert device_for(mlp(), cpu, "model1") == cpu
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert device_for(mlp(), None, "model1").type == (accelerator.type if accelerator else "cpu")


class Spread(nn.Module):
    """Reports weights on two devices."""

    def parameters(self, recurse=True):
        yield torch.zeros(1)
        yield type("Elsewhere", (), {"device": torch.device("cuda", 1)})()


def test_model_on_several_devices_is_not_moved():
    """If a device is given for a model on several, the error names these and says what to do."""
    assert device_for(Spread(), None, "model1") == torch.device("cpu")
    with pytest.raises(
        InputError, match=r"model1 cannot run on cpu: it is spread over cpu, cuda:1; omit device"
    ):
        device_for(Spread(), torch.device("cpu"), "model1")


def test_model_that_is_sharded_over_ranks_is_not_moved(monkeypatch):
    """Shards on the CPU stay there beside a GPU, because their ranks exchange them on the CPU."""
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu)
    model = mlp()
    assert device_for(model, None, "model1") == gpu
    for weight in model.parameters():
        weight.device_mesh = "a mesh of the CPU"
    assert device_for(model, None, "model1") == cpu
    assert device_for(model, cpu, "model1") == cpu
    with pytest.raises(
        InputError,
        match=r"model1 cannot run on cuda:0: it is sharded over ranks, with weights on cpu; omit "
        r"device to run it as it is, or shard it over a mesh of cuda",
    ):
        device_for(model, gpu, "model1")
