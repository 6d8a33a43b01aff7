"""Put models on devices and in evaluation mode, restore both afterwards; run in step with ranks.

Layers of a sharded model (FSDP, tensor parallel) fetch weights from the other ranks. A rank that
runs it once more than the others would wait forever, e.g. because only its batch has padding, is
large enough, or is not the last one. So before each pass the ranks say whether they need one, and a
rank that does not need it runs along, without its layers being measured (:class:`Lockstep`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cka.errors import InputError


def is_active() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return this process's rank; 0 if it is the only one."""
    return dist.get_rank() if is_active() else 0


def gather(own: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks: builtin types that JSON can write.

    Ranks exchange tensors of bytes. ``torch.distributed`` can exchange any object, but by pickle,
    which runs code that the sender chooses.

    Args:
        own: this rank's value, of builtin types.
    """
    device = _exchange_device(torch.device("cpu"))
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(device)
    # Ranks' texts have different lengths, and all_gather needs one: they are padded to the longest.
    sizes = [size.item() for size in _all_gather(torch.tensor([len(data)], device=device))]
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    texts = zip(sizes, _all_gather(padded), strict=True)
    return [json.loads(bytes(text[: int(size)].tolist())) for size, text in texts]


def all_numbers(own: int) -> list[int]:
    """Return the number of each rank, in the order of ranks."""
    device = _exchange_device(torch.device("cpu"))
    return [int(number) for number in _all_gather(torch.tensor([own], device=device))]


def _all_gather(own: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return gathered


def sum_over_ranks(vector: Tensor) -> Tensor:
    """Return the sum of the vectors of all ranks, on every rank and on the vector's device.

    Args:
        vector: this rank's tensor; its shape must be the same on all ranks.
    """
    total = vector.to(_exchange_device(vector.device), copy=True)
    dist.all_reduce(total)
    return total.to(vector.device)


def _exchange_device(device: torch.device) -> torch.device:
    # NCCL can only exchange tensors on accelerators.
    if device.type == "cpu" and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks compute together in the model's forward pass, because each has a part of it.

    These are models under FSDP (of either version), tensor parallelism and DeepSpeed's ZeRO 3.
    Nothing is imported: a model can only be sharded by what is imported already.
    """
    # DTensor has a device_mesh, and a weight of ZeRO 3 a ds_id.
    if any(hasattr(each, "device_mesh") or hasattr(each, "ds_id") for each in model.parameters()):
        return True
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return fsdp is not None and any(isinstance(module, fsdp) for module in model.modules())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DataParallel, DistributedDataParallel and torch.compile wrappers.

    Hooks are not called inside compiled graphs. Under DataParallel they are called once per
    replica, each time with a part of the batch. The network itself runs on the whole batch.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif (original := _original(model)) is not None:
            model = original
        else:
            return model


def eager(models: list[nn.Module]) -> AbstractContextManager[object]:
    """Return a context in which compiled parts run uncompiled, so that their hooks are called.

    Args:
        models: the models that run in the context.
    """
    modules = chain.from_iterable(model.modules() for model in models)
    # A torch version without _compiled_call_impl does not show whether a part is compiled.
    if not any(
        _original(module) is not None or getattr(module, "_compiled_call_impl", True) is not None
        for module in modules
    ):
        return nullcontext()  # set_stance imports the compiler, which takes a second
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


# The private names _orig_mod and _compiled_call_impl of torch are used only in this module.
def _original(model: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped, by its name in state dicts, or None."""
    if isinstance(model, torch.jit.ScriptModule):  # its _modules is not a dict
        return None
    original = model.__dict__.get("_modules", {}).get("_orig_mod")
    return original if isinstance(original, nn.Module) else None


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Run transformer layers by their own modules instead of torch's fused fast path.

    In evaluation mode ``nn.TransformerEncoder`` computes each layer in one operator, on nested
    tensors if there is a padding mask: its modules are not called, and nested outputs cannot be
    compared. The setting belongs to the process, and is restored.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def evaluation_mode(models: list[nn.Module]) -> Iterator[None]:
    """Set evaluation mode for every module; restore each module's own mode afterwards.

    Each flag is set separately, because ``model.train(was_training)`` would set a frozen batch
    norm inside a model in training mode to training mode as well.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        # In reverse, because a module of two models is listed twice: its first mode is the user's.
        for module, training in reversed(modes):
            module.training = training


def device_for(model: nn.Module, device: torch.device | None, name: str) -> torch.device:
    """Return the device on which a model runs.

    This is ``device`` if it is given; otherwise the model's own device if that is an accelerator;
    otherwise the current accelerator, or the CPU if none is available. A model on several devices
    is not moved, and its batches are copied to the device of its first weight. Nor is a model that
    is sharded over ranks: they exchange its weights by a process group of its device.

    Args:
        model: the model.
        device: the device that the user chose; None if none was chosen.
        name: name of the model in the message of an error.

    Raises:
        InputError: if the model cannot be moved to ``device``.
    """
    current = devices_of(model)
    if current and is_sharded(model):
        if device is not None and _with_index(device) != current[0]:
            raise InputError(
                f"{name} cannot run on {device}: it is sharded over ranks, with weights on "
                f"{current[0]}; omit device to run it as it is, or shard it over a mesh of "
                f"{device.type}"
            )
        return current[0]
    if len(current) > 1:
        if device is not None:
            raise InputError(
                f"{name} cannot run on {device}: it is spread over "
                f"{', '.join(map(str, current))}; "
                f"omit device to run it as it is, or move it to {device} first"
            )
        return current[0]
    if device is not None:
        return _with_index(device)
    if current and current[0].type != "cpu":
        return current[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else _with_index(accelerator)


def devices_of(model: nn.Module) -> list[torch.device]:
    """Return the devices of the weights and buffers, each once and without ``meta``."""
    tensors = chain(model.parameters(), model.buffers())
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "meta"))


@contextmanager
def moved_to(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to a device; move it back afterwards.

    A model that is on several devices, or on none, is not moved.
    """
    before = devices_of(model)
    if len(before) != 1 or before[0] == device:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to(before[0])


def input_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the floating-point dtype of all weights, for the inputs; None if they differ."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _with_index(device: torch.device) -> torch.device:
    """Return ``cuda`` as, e.g., ``cuda:0``, so that it equals the device of a tensor."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.empty(0, device=device).device


_DONE, _PASS, _FAILED, _NO_BATCH = range(4)


class Batches(NamedTuple):
    """What the loaders yielded, or the last of it for a rank that has no more."""

    batches: tuple[Any, ...]
    """One batch, or one for each loader."""
    is_own: bool
    """Whether this rank measures it. If not, it only runs along."""


class Lockstep:
    """Agrees with the other ranks about passes; does nothing if no model is sharded."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Look whether a model is sharded over ranks."""
        self.is_needed = is_active() and any(map(is_sharded, models))

    def batches(self, own: Iterable[tuple[Any, ...]]) -> Iterator[Batches]:
        """Yield the batches of this rank, and then its last ones until no rank has any left.

        Args:
            own: the batches of this rank.

        Raises:
            InputError: if this rank or another one has no batch at all, or stopped with an error.
        """
        if not self.is_needed:
            for each in own:
                yield Batches(each, is_own=True)
                del each  # otherwise it stays alive while the next one is fetched
            return
        last: tuple[Any, ...] | None = None
        iterator = iter(own)
        while True:
            with self.saying_failures():
                current = next(iterator, None)
            state = _PASS if current is not None else _NO_BATCH if last is None else _DONE
            states = self._exchange(state)
            if _NO_BATCH in states and set(states) != {_NO_BATCH}:
                raise InputError(
                    f"rank {states.index(_NO_BATCH)} has no batch, but the layers of a sharded "
                    "model run on all ranks together; give every rank at least one batch"
                )
            if _PASS not in states:
                return
            last = last if current is None else current
            assert last is not None
            yield Batches(last, is_own=current is not None)

    def of_all(self, names: Iterable[str]) -> set[str]:
        """Return the names that any rank has.

        Raises:
            InputError: if another rank stopped with an error.
        """
        if not self.is_needed:
            return set(names)
        self._exchange(_DONE)
        return set().union(*gather(sorted(names)))

    @contextmanager
    def passes(self, run_along: Callable[[], Any]) -> Iterator[Callable[[], None]]:
        """Yield a function to call before each pass; at the end, run along with other ranks.

        Args:
            run_along: runs the model, for passes that only other ranks need.

        Raises:
            InputError: if another rank stopped with an error.
        """
        if not self.is_needed:
            yield lambda: None
            return

        def announce() -> None:
            self._exchange(_PASS)

        with self.saying_failures():
            yield announce
        while _PASS in self._exchange(_DONE):
            run_along()

    @contextmanager
    def saying_failures(self) -> Iterator[None]:
        """Let the other ranks raise as well, instead of waiting for this one.

        For code between two passes of the model, which the other ranks end at their next one.
        """
        try:
            yield
        except _OtherRankError:
            raise
        except BaseException:
            if self.is_needed:
                all_numbers(_FAILED)
            raise

    def _exchange(self, own: int) -> list[int]:
        states = all_numbers(own)
        if _FAILED in states:
            raise _OtherRankError(
                f"rank {states.index(_FAILED)} stopped with an error; see its message"
            )
        return states


class _OtherRankError(InputError):
    """Another rank stopped with an error, which it has said already."""
