"""Clean programs by the feature of torch that they use."""

import contextlib
import copy
from typing import Any

import torch
import torch.nn.utils.parametrizations
from clean import BATCHES, Running, Table, clean
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

TORCH: Table = []


def training(model: nn.Module, make: Any, *inputs: torch.Tensor) -> Running:
    """Take one step before the region, which allocates gradients and state, and more inside."""
    optimizer = make(model.parameters())
    for number in range(BATCHES + 1):
        output = model(*inputs)
        loss = (output[0] if isinstance(output, tuple) else output).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if number == 0:
            del output, loss
        yield


@clean(TORCH)
def adam_after_a_warm_up_step() -> Running:
    yield from training(nn.Linear(5, 5), torch.optim.Adam, torch.ones(2, 5))


@clean(TORCH)
def momentum_and_batch_norm() -> Running:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()).train()
    yield from training(
        model, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.ones(2, 3, 5, 5)
    )


@clean(TORCH)
def lstm() -> Running:
    yield from training(nn.LSTM(5, 4), torch.optim.SGD, torch.ones(3, 2, 5))


@clean(TORCH)
def attention() -> Running:
    x = torch.ones(3, 2, 4)
    yield from training(nn.MultiheadAttention(4, 2), torch.optim.SGD, x, x, x)


@clean(TORCH)
def gradients_set_to_none() -> Running:
    model = nn.Linear(5, 5)
    yield
    for _ in range(BATCHES):
        model(torch.ones(2, 5)).sum().backward()
        model.zero_grad()
        yield


@clean(TORCH)
def losses_as_numbers() -> Running:
    model, losses = nn.Linear(5, 5), []
    yield
    for _ in range(BATCHES):
        losses.append(model(torch.ones(2, 5)).sum().item())
        yield


@clean(TORCH)
def graph_retained_then_dropped() -> Running:
    weight = torch.ones(5, requires_grad=True)
    yield
    loss = weight.exp().sum()
    torch.autograd.grad(loss, weight, retain_graph=True)
    torch.autograd.grad(loss, weight)


@clean(TORCH)
def double_backward() -> Running:
    weight = torch.ones(5, requires_grad=True)
    yield
    (gradient,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
    torch.autograd.grad(gradient.sum(), weight)


@clean(TORCH)
def gradient_checkpointing() -> Running:
    layer = nn.Linear(5, 5)
    yield
    for reentrant in (True, False):
        x = torch.ones(2, 5, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    layer.zero_grad()


@clean(TORCH)
def hooks_removed() -> Running:
    layer, outputs = nn.Linear(5, 5), []
    yield
    with layer.register_forward_hook(lambda *call: outputs.append(call[2])):
        layer(torch.ones(2, 5))
    handle = layer.register_full_backward_hook(lambda *call: outputs.append(call[2]))
    layer(torch.ones(2, 5, requires_grad=True)).sum().backward()
    handle.remove()
    outputs.clear()
    layer.zero_grad()


@clean(TORCH)
def inference_mode() -> Running:
    layer = nn.Linear(5, 5)
    yield
    with torch.inference_mode():
        for _ in range(BATCHES):
            layer(torch.ones(2, 5))
            yield


@clean(TORCH)
def autocast() -> Running:
    layer = nn.Linear(5, 5)
    yield
    for _ in range(BATCHES):
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.ones(2, 5))
        yield


@clean(TORCH)
def views_of_an_old_tensor() -> Running:
    old, kept = torch.ones(4, 5), []
    yield
    kept.extend([old.T, old[1:3].unsqueeze(0), old.expand(2, 4, 5), old.detach()])
    yield


@clean(TORCH)
def parameters_sharing_one_storage() -> Running:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    yield
    second.weight.data = first.weight.data.view(5, 5)


@clean(TORCH)
def numpy_alias_released() -> Running:
    yield
    array = torch.ones(250).numpy()
    memory = memoryview(array)
    assert torch.from_numpy(array).sum() == len(memory)


@clean(TORCH)
def in_place_and_out() -> Running:
    x, out = torch.ones(250), torch.empty(250)
    yield
    x.add_(1).mul_(torch.ones(250))
    torch.add(x, 1, out=out)


@clean(TORCH)
def storage_resized_and_back() -> Running:
    x = torch.ones(250)
    yield
    x.resize_(500).resize_(250)
    x.untyped_storage().resize_(1000)


@clean(TORCH)
def sparse_tensors_dropped() -> Running:
    yield
    for _ in range(BATCHES):
        torch.sparse.mm(torch.eye(5).to_sparse(), torch.ones(5, 5))
        torch.eye(5).to_sparse_csr()
        yield


@clean(TORCH)
def vmap_and_function_transforms() -> Running:
    x = torch.ones(3, 5)
    yield
    torch.vmap(lambda row: row * torch.ones(5))(x)
    torch.func.grad(lambda it: it.exp().sum())(x)
    torch.func.jvp(torch.sin, (x,), (x,))
    torch.func.jacrev(torch.sin)(x)


@clean(TORCH)
def dual_tensors() -> Running:
    yield
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(5), torch.ones(5)).exp()


@clean(TORCH)
def fake_tensors() -> Running:
    kept = []
    yield
    with FakeTensorMode():
        kept.append(torch.ones(1000) @ torch.ones(1000))
    yield


@clean(TORCH)
def meta_tensors() -> Running:
    kept = []
    yield
    kept.append(nn.Linear(1000, 1000, device="meta"))
    yield


@clean(TORCH)
def parametrizations() -> Running:
    yield
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
    with nn.utils.parametrize.cached():
        layer(torch.ones(2, 5)).sum().backward()
    nn.utils.parametrize.remove_parametrizations(layer, "weight")


@clean(TORCH)
def profiler_run_inside() -> Running:
    yield
    with profile(profile_memory=True, record_shapes=True) as result:
        torch.ones(50, 5).sum()
    assert result.key_averages()


@clean(TORCH)
def anomaly_detection() -> Running:
    weight = torch.ones(5, requires_grad=True)
    yield
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.autograd.grad(weight.exp().sum(), weight)


@clean(TORCH)
def loader_without_workers() -> Running:
    loader = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 5)), batch_size=4, shuffle=True)
    yield
    for (x,) in loader:
        assert len(x) == 4
        yield


@clean(TORCH)
def loader_with_two_workers() -> Running:
    loader = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 5)), batch_size=4, num_workers=2)
    yield
    for (x,) in loader:
        assert len(x) == 4
        yield


@clean(TORCH)
def scripted_module() -> Running:
    yield
    torch.jit.trace(nn.Linear(5, 5), torch.ones(2, 5))(torch.ones(2, 5))


def compiled(backend: str) -> Running:
    torch._dynamo.reset()
    layer = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    call = torch.compile(layer, backend=backend)
    for _ in range(BATCHES + 1):
        call(torch.ones(2, 5)).sum().backward()
        layer.zero_grad()
        yield
    torch._dynamo.reset()


@clean(TORCH)
def compiled_with_eager() -> Running:
    yield from compiled("eager")


@clean(TORCH)
def compiled_with_aot_eager() -> Running:
    yield from compiled("aot_eager")


@clean(TORCH)
def compiled_inside_the_region() -> Running:
    torch._dynamo.reset()
    layer = nn.Linear(5, 5)
    yield
    with torch.no_grad():
        torch.compile(layer, backend="eager")(torch.ones(2, 5))


@clean(TORCH)
def copy_in_another_dtype() -> Running:
    layer = nn.Linear(5, 5)
    yield
    copy.deepcopy(layer).double()(torch.ones(2, 5, dtype=torch.float64))
    with contextlib.suppress(RuntimeError):
        layer(torch.ones(2, 6))
    yield
