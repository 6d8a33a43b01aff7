"""Compare the numbers of two runs: what a loss was, and every gradient."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.repair.modules import calls_followed
from pytest_cka_memory.repair.trials import replaced

LAST_DIGITS = 1e-5
"""By how much of the largest gradient of a parameter others may differ if they are rounded
differently."""


@contextmanager
def values_kept(path: str) -> Iterator[None]:
    """Write what the block computes to a file: the first loss, the gradients of its backward pass,
    and what models returned before it. Later steps would amplify how they are rounded.
    """
    kept: dict[str, Any] = {"losses": [], "gradients": {}, "results": [], "parts": []}
    handles: list[Any] = []
    known: set[int] = set()
    parameters: dict[str, weakref.ref[torch.Tensor]] = {}
    passes = [0]

    def begins(module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        if outer or passes[0]:  # in the backward pass checkpointed modules are called again
            return
        for name, parameter in module.named_parameters():
            if id(parameter) not in known and parameter.requires_grad and parameter.is_leaf:
                known.add(id(parameter))
                parameters[f"{len(known)}.{name}"] = weakref.ref(parameter)
                handles.append(_keep(kept["gradients"], f"{len(known)}.{name}", parameter))

    def ends(module: Any, outer: list[torch.nn.Module], given: Any, result: Any) -> None:
        is_result = isinstance(result, torch.Tensor) and not result.requires_grad
        if is_result and not outer and not passes[0]:
            kept["results"].append(result.detach().cpu())

    def recorded(backward: Callable[..., Any]) -> Callable[..., Any]:
        def record(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            passes[0] += 1
            if passes[0] == 1 and isinstance(tensors, torch.Tensor):
                kept["losses"].append(tensors.detach().cpu())
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                _remove(handles)
                if passes[0] == 1:
                    _keep_sharded(kept["gradients"], kept["parts"], parameters)

        return record

    with ExitStack() as stack:
        stack.enter_context(calls_followed(begins, ends))
        backward = torch.autograd.backward
        stack.enter_context(replaced(torch.autograd, "backward", recorded(backward)))
        try:
            yield
        finally:
            _remove(handles)
    torch.save(kept, path)


def _keep(gradients: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> Any:
    def keep(gradient: torch.Tensor) -> None:
        gradients[name] = gradient.detach().cpu().clone()

    # Before it is accumulated: an optimizer may step then, and free it.
    return parameter.register_hook(keep)


def _keep_sharded(
    gradients: dict[str, torch.Tensor],
    parts: list[str],
    parameters: dict[str, "weakref.ref[torch.Tensor]"],
) -> None:
    """Keep the gradients of parameters that ``fully_shard`` has spread: it calls no hook of them,
    and sets what this process has of each gradient when it is reduced.
    """
    for name, reference in parameters.items():
        parameter: Any = reference()
        if name in gradients or not hasattr(parameter, "to_local") or parameter.grad is None:
            continue
        gradients[name] = parameter.grad.to_local().detach().cpu().clone()
        parts.append(name)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class Difference(NamedTuple):
    """How two runs differ."""

    is_equal: bool
    """Whether everything is equal, bit for bit."""
    largest: float
    """The largest difference, as a share of the largest element of its tensor."""
    where: str
    compared: int
    """How many tensors were compared."""


def difference(before: str, *after: str) -> Difference:
    """Compare two files of :func:`values_kept`.

    Args:
        before: the first file.
        after: the second one, or those of all ranks, each of which has parts of the gradients.

    Raises:
        ValueError: if they have different gradients or losses.
    """
    old, new, *others = (torch.load(path, weights_only=True) for path in (before, *after))
    for name in new["parts"] if others else ():
        parts = [each["gradients"][name] for each in (new, *others)]
        new["gradients"][name] = torch.cat(parts)  # fully_shard spreads the first dimension
    pairs = [(f"loss {n}", *pair) for n, pair in enumerate(_zipped(old, new, "losses"), 1)]
    pairs += [(f"result {n}", *pair) for n, pair in enumerate(_zipped(old, new, "results"), 1)]
    if old["gradients"].keys() != new["gradients"].keys():
        missing = sorted(old["gradients"].keys() ^ new["gradients"].keys())
        raise ValueError(f"only one run has a gradient of {missing[0].partition('.')[2]}")
    for name, tensor in old["gradients"].items():
        other = new["gradients"][name]
        pairs.append((f"gradient of {name.partition('.')[2]}", tensor, other))
    largest, where, is_equal = 0.0, "", True
    for name, one, other in pairs:
        is_equal &= torch.equal(one, other)
        relative = _relative(one.double(), other.double())
        if relative > largest:
            largest, where = relative, name
    return Difference(is_equal, largest, where, len(pairs))


def _zipped(old: Any, new: Any, key: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if len(old[key]) != len(new[key]):
        raise ValueError(f"{len(old[key])} {key} before, {len(new[key])} after")
    yield from zip(old[key], new[key], strict=True)


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    scale = max(float(one.abs().max()), 1e-30)
    return float((one - other).abs().max()) / scale
