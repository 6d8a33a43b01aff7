"""What backward needs is kept on the host, and copied back when it is needed."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_cka_memory.repair.changes.forwards import (
    Forward,
    edits_of_roots,
    forward_of_roots,
)
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import Change, Copied, Refusal
from pytest_cka_memory.repair.written import saved_on_host, text_of


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``save_on_cpu`` around the models that are trained, unless they are on the host."""
    roots = [root for root in observed.roots if root.has_gradients]
    if not roots or observed.device == "cpu" or observed.is_compiled:
        return
    yield Change(
        "save activations on the host",
        "host",
        functools.partial(_trying, roots, observed.has_values),
        edits=edits_of_roots(roots, "saved_on_host", "saved_on_host", text_of(saved_on_host)),
        advice="call the model in torch.autograd.graph.save_on_cpu()",
        order=2,
    )


@contextmanager
def _trying(roots: list[Root], has_values: bool, copied: Copied) -> Iterator[None]:
    with forward_of_roots(roots, functools.partial(_on_host, has_values, copied)):
        yield


def _on_host(has_values: bool, copied: Copied, forward: Forward) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Counting(copied) if has_values else _WithoutCopies(copied):
            return forward(*args, **kwargs)

    return run


class _Counting(torch.autograd.graph.save_on_cpu):
    """Counts what is copied to the host."""

    def __init__(self, copied: Copied) -> None:
        super().__init__()
        pack = self.pack_hook

        def packed(tensor: torch.Tensor) -> Any:
            copied.bytes += tensor.nbytes
            return pack(tensor)

        self.pack_hook = packed


class _WithoutCopies(torch.autograd.graph.saved_tensors_hooks):
    """Allocates and frees on the device what ``save_on_cpu`` does, and copies nothing.

    For emulated devices without values, where the copies would take most of the time.
    """

    def __init__(self, copied: Copied) -> None:
        def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
            copied.bytes += tensor.nbytes
            tensor.contiguous()  # as copying to the host does, for a moment
            return tensor.size(), tensor.dtype, tensor.device

        def unpack(packed: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
            size, dtype, device = packed
            return torch.empty(size, dtype=dtype, device=device)

        super().__init__(pack, unpack)
