"""Compare the numbers of two runs: what a loss was, and every gradient."""

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
    """Write the losses and gradients of the block to a file, and what models returned if none.

    Of each parameter it is the last gradient that was complete. All are copied to the host.
    """
    kept: dict[str, Any] = {"losses": [], "gradients": {}, "results": []}
    handles: list[Any] = []
    seen: set[int] = set()

    def begins(module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        if outer or id(module) in seen:
            return
        seen.add(id(module))
        number = len(seen)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handles.append(_keep(kept["gradients"], f"{number}.{name}", parameter))

    def ends(module: Any, outer: list[torch.nn.Module], given: Any, result: Any) -> None:
        if not outer and isinstance(result, torch.Tensor) and not result.requires_grad:
            kept["results"].append(result.detach().cpu())

    def recorded(backward: Callable[..., Any]) -> Callable[..., Any]:
        def record(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, torch.Tensor):
                kept["losses"].append(tensors.detach().cpu())
            return backward(tensors, *args, **kwargs)

        return record

    with ExitStack() as stack:
        stack.enter_context(calls_followed(begins, ends))
        backward = torch.autograd.backward
        stack.enter_context(replaced(torch.autograd, "backward", recorded(backward)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
    torch.save(kept, path)


def _keep(gradients: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> Any:
    def keep(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            gradients[name] = parameter.grad.detach().cpu()

    return parameter.register_post_accumulate_grad_hook(keep)


class Difference(NamedTuple):
    """How two runs differ."""

    is_equal: bool
    """Whether everything is equal, bit for bit."""
    largest: float
    """The largest difference, as a share of the largest element of its tensor."""
    where: str
    compared: int
    """How many tensors were compared."""


def difference(before: str, after: str) -> Difference:
    """Compare two files of :func:`values_kept`.

    Raises:
        ValueError: if they have different gradients or losses.
    """
    old, new = (torch.load(path, weights_only=True) for path in (before, after))
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
        found = _relative(one.double(), other.double())
        if found > largest:
            largest, where = found, name
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
