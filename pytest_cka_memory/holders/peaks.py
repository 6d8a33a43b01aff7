"""Advice on what was live at a peak, if it is certain what keeps most of it."""

from collections.abc import Sequence

from pytest_cka_memory.core.allocations import AllocationGroup, Context, Freed
from pytest_cka_memory.core.kinds import ACTIVATIONS, GRADIENTS

_NO_GRAD = (
    "an autograd graph keeps it for a backward pass, and none was seen to free it: if none "
    "follows, compute it in torch.no_grad()"
)


def advice(groups: Sequence[AllocationGroup], kinds: Sequence[str]) -> str | None:
    """Return how to free what autograd graphs kept at a peak; None if that is not certain.

    It is not if a backward pass ran, which needs the graphs, or if they kept less than half.

    Args:
        groups: what was allocated in the region.
        kinds: the kind of memory of each group.
    """
    if GRADIENTS in kinds or any(_is_of_backward(group) for group in groups):
        return None
    sizes = [(group.bytes, kind) for group, kind in zip(groups, kinds, strict=True)]
    kept_bytes = sum(size for size, kind in sizes if kind == ACTIVATIONS)
    return _NO_GRAD if kept_bytes and 2 * kept_bytes >= sum(size for size, _ in sizes) else None


def _is_of_backward(group: AllocationGroup) -> bool:
    return group.context == Context.BACKWARD or group.freed == Freed.IN_BACKWARD
