"""Ways to make a tensor, each by one call: constructors, copies, files, optimizers, loaders."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Maker(NamedTuple):
    """A function that returns a new tensor, or what holds one, and the call that makes it."""

    make: Callable[[Path], Any]
    call: str
    """Part of the line that must be named."""
    known_to_storages: bool
    """Whether it is also known if storages are counted from Python, without the library."""


MAKERS: list[Maker] = []
NET = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
DATA = TensorDataset(torch.ones(8, 250))


def maker(call: str, *, known_to_storages: bool = True) -> Callable[[Any], Any]:
    """Add the decorated function to the table."""

    def add(make: Callable[[Path], Any]) -> Any:
        MAKERS.append(Maker(make, call, known_to_storages))
        return make

    return add


@maker("torch.tensor(")
def tensor(folder: Path) -> Any:
    return torch.tensor([1.0] * 250)


@maker("torch.as_tensor(")
def as_tensor(folder: Path) -> Any:
    return torch.as_tensor([1.0] * 250)


@maker("torch.as_tensor(")
def as_tensor_of_an_array(folder: Path) -> Any:
    return torch.as_tensor(np.ones(250))


@maker("torch.from_numpy(")
def from_numpy(folder: Path) -> Any:
    return torch.from_numpy(np.ones(250))


@maker("torch.asarray(")
def asarray(folder: Path) -> Any:
    return torch.asarray([1.0] * 250)


@maker("torch.frombuffer(", known_to_storages=False)
def frombuffer(folder: Path) -> Any:
    return torch.frombuffer(bytearray(1000), dtype=torch.float32)


@maker("torch.from_dlpack(", known_to_storages=False)
def from_dlpack(folder: Path) -> Any:
    return torch.from_dlpack(np.ones(250))


@maker("torch.UntypedStorage(", known_to_storages=False)
def storage(folder: Path) -> Any:
    return torch.UntypedStorage(1000)


@maker("torch.get_rng_state()", known_to_storages=False)
def state_of_a_generator(folder: Path) -> Any:
    return torch.get_rng_state()


@maker("copy.deepcopy(")
def deepcopy_of_a_module(folder: Path) -> Any:
    return copy.deepcopy(NET)


@maker("copy.deepcopy(")
def deepcopy_of_a_tensor(folder: Path) -> Any:
    return copy.deepcopy(torch.ones(250))


@maker("AveragedModel(")
def averaged_model(folder: Path) -> Any:
    return torch.optim.swa_utils.AveragedModel(NET)


@maker("pickle.loads(")
def unpickled(folder: Path) -> Any:
    return pickle.loads(pickle.dumps(DATA.tensors[0]))


@maker("torch.load(")
def loaded(folder: Path) -> Any:
    torch.save({"weight": DATA.tensors[0]}, folder / "saved.pt")
    return torch.load(folder / "saved.pt")


@maker("torch.load(", known_to_storages=False)
def loaded_by_mapping(folder: Path) -> Any:
    torch.save({"weight": DATA.tensors[0]}, folder / "mapped.pt")
    return torch.load(folder / "mapped.pt", mmap=True)


@maker("torch.load(")
def state_dict_that_is_assigned(folder: Path) -> Any:
    torch.save(NET.state_dict(), folder / "state.pt")
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    net.load_state_dict(torch.load(folder / "state.pt"), assign=True)
    return net


@maker("load_file(", known_to_storages=False)
def safetensors_file(folder: Path) -> Any:
    from safetensors.torch import load_file, save_file

    save_file({"weight": DATA.tensors[0]}, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


@maker("torch.ones(2, 10)")
def traced_module(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(NET, torch.ones(2, 10))


@maker("jit.load(")
def loaded_module_of_torchscript(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        torch.jit.save(torch.jit.trace(NET, DATA.tensors[0][:, :10]), file)
        file.seek(0)
        return torch.jit.load(file)


@maker(".step()")
def state_of_adam(folder: Path) -> Any:
    return stepped(torch.optim.Adam(NET.parameters()))


@maker(".step()")
def state_of_sgd(folder: Path) -> Any:
    return stepped(torch.optim.SGD(NET.parameters(), momentum=0.9))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    NET(DATA.tensors[0][:, :10]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@maker("for batch in")
def batches_of_a_loader(folder: Path) -> Any:
    return [batch for batch in DataLoader(DATA, batch_size=4)]  # noqa: C416


@maker("for batch in", known_to_storages=False)
def batches_of_a_worker(folder: Path) -> Any:
    loader = DataLoader(DATA, batch_size=4, num_workers=1)
    return [batch for batch in loader]  # noqa: C416


@maker(".half()")
def module_in_half_precision(folder: Path) -> Any:
    return copy.deepcopy(NET).half()


@maker("stack_module_state(")
def stacked_states(folder: Path) -> Any:
    return torch.func.stack_module_state([NET, NET])
