"""Activations that overwrite their input."""

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_cka_memory.repair.edits import with_argument, wrapped
from pytest_cka_memory.repair.modules import calls_followed
from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.trials import Change, Copied, Refusal
from pytest_cka_memory.repair.written import in_place, text_of


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield in-place activations, unless something reads their input after them."""
    if not observed.backward_calls or observed.is_compiled:
        return
    for kind, sites in observed.activations.items():
        name = f"{kind.__name__}(inplace=True)"
        if kind in observed.read_again:
            yield Refusal(name, observed.read_again[kind])
            continue
        yield Change(
            name,
            f"in place {kind.__name__}",
            functools.partial(_trying, kind),
            edits=_edits(observed, kind, sites),
            advice=f"make {kind.__name__} with inplace=True",
            order=-1,
        )


def _edits(observed: Observed, kind: type, sites: list[Any]) -> Any:
    if None not in sites:
        edits = [with_argument(site, "inplace", "True") for site in dict.fromkeys(sites)]
        if None not in edits:
            return tuple(edits)
    roots = {root.made_at for root in observed.roots if root.classes[kind]}
    if None in roots:
        return None
    after = f', "{kind.__name__}")'
    return tuple(wrapped(site, "in_place(", after, text_of(in_place)) for site in roots if site)


@contextmanager
def _trying(kind: type[torch.nn.Module], copied: Copied) -> Iterator[None]:
    changed: weakref.WeakSet[Any] = weakref.WeakSet()

    def begins(module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        activation: Any = module
        if type(module) is kind and not activation.inplace:
            activation.inplace = True
            changed.add(activation)

    with calls_followed(begins):
        try:
            yield
        finally:
            for module in changed:
                module.inplace = False
