"""Optimizer states of 8 or 4 bits, by torchao, if it is installed."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from pytest_cka_memory.repair.edits import with_callee
from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.trials import Change, Copied, Refusal, replaced
from pytest_cka_memory.repair.written import of_torchao, text_of

_KINDS = {torch.optim.Adam: "Adam", torch.optim.AdamW: "AdamW"}
_BITS = (8, 4)
_LEAST_SHARE = 0.1
"""Of what a step surely needs. torchao compiles its update, which takes longer than all other
trials together, so that it is tried only if it may save something."""


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield the optimizers of torchao instead of Adam and AdamW."""
    kinds = [kind for kind in observed.optimizers if kind in _KINDS]
    if not kinds or len(kinds) < len(observed.optimizers) or observed.device != "cuda":
        return
    if find_spec("torchao") is None or not _may_save(observed):
        return
    (kind, *others) = kinds
    if others:
        return
    site = observed.optimizers[kind]
    for bits in _BITS:
        name = f"{_KINDS[kind]}{bits}bit"
        callee = f'of_torchao("{name}")'
        edit = with_callee(site, callee, text_of(of_torchao)) if site is not None else None
        yield Change(
            f"torchao's {name}",
            "optimizer",
            functools.partial(_trying, kind, name),
            numbers=f"changes the numbers: optimizer states of {bits} bits",
            edits=None if edit is None else (edit,),
            advice=f"use torchao.optim.{name} instead of {kind.__name__}",
            rounds_updates=True,
        )


def _may_save(observed: Observed) -> bool:
    """Whether two states of each parameter are much of what the step surely needs."""
    states = 2 * observed.state_bytes
    saved = sum(sum(root.saved_bytes.get(root.kind, ())) for root in observed.roots)
    return states > 0 and states >= _LEAST_SHARE * (2 * states + saved)


@contextmanager
def _trying(kind: type[torch.optim.Optimizer], name: str, copied: Copied) -> Iterator[None]:
    def wrapper(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            if type(optimizer) is not kind:
                init(optimizer, *args, **kwargs)
                return
            changed: Any = optimizer
            changed.__class__ = getattr(importlib.import_module("torchao.optim"), name)
            options = {key: kwargs[key] for key in kwargs.keys() - {"foreach", "fused"}}
            changed.__init__(*args, **options)

        return made

    with ExitStack() as stack:
        stack.enter_context(replaced(kind, "__init__", wrapper(kind.__init__)))
        yield
