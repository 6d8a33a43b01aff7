"""Graphs that nobody needs: models whose results are never differentiated."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_cka_memory.repair.changes.forwards import Forward, forward_of_roots
from pytest_cka_memory.repair.edits import in_context, wrapped
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import Change, Copied, Refusal


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``no_grad`` for models that no backward pass reaches."""
    unused = [root for root in observed.roots if root.needs_gradients and not root.has_gradients]
    if not unused:
        return
    names = ", ".join(dict.fromkeys(root.kind.__name__ for root in unused))
    sites = {root.called_at for root in unused}
    edits = []
    for site in sites - {None}:
        assert site is not None
        edits.append(
            in_context(site, "torch.no_grad()") or wrapped(site, "torch.no_grad()(lambda: ", ")()")
        )
    yield Change(
        f"no_grad for {names}",
        "gradients",
        functools.partial(_trying, unused),
        edits=None if None in sites else tuple(edits),
        advice="no backward pass uses its result: call it in torch.no_grad()",
    )


@contextmanager
def _trying(roots: list[Root], copied: Copied) -> Iterator[None]:
    def without_graph(forward: Forward) -> Forward:
        return torch.no_grad()(forward)

    with forward_of_roots(roots, without_graph):
        yield
