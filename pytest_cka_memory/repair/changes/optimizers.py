"""How an optimizer updates the parameters, when gradients are freed, and states of few bits.

States of 8 or 4 bits are those of torchao, if it is installed.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_cka_memory.repair import Edit, with_argument, with_callee, wrapped
from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Copied, Refusal, replaced
from pytest_cka_memory.repair.written import of_torchao, step_in_backward, text_of


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield what applies to the optimizers that step."""
    for site in observed.keeps_zeros[:1]:
        edit = None if site is None else with_argument(site, "set_to_none", "True")
        yield Change(
            "zero_grad(set_to_none=True)",
            "zero_grad",
            _setting_to_none,
            edits=None if edit is None else (edit,),
            advice="pass set_to_none=True, its default, to zero_grad",
        )
    if not observed.steps:
        return
    if observed.foreach and observed.device != "cpu":
        yield _with_option(observed, "foreach", False, LAST_DIGITS)
    yield from _in_backward(observed)


def _with_option(observed: Observed, name: str, value: bool, numbers: str) -> Change:
    edits = _edits(observed, lambda site: with_argument(site, name, str(value)))
    kinds = ", ".join(kind.__name__ for kind in observed.optimizers)
    return Change(
        f"{kinds}({name}={value})",
        "optimizer",
        functools.partial(_stepping_with, name, value),
        numbers=numbers,
        edits=edits,
        advice=f"pass {name}={value} to {kinds}",
    )


def _edits(observed: Observed, edit: Callable[[Any], Edit | None]) -> tuple[Edit, ...] | None:
    edits = [None if site is None else edit(site) for site in observed.optimizers.values()]
    return None if None in edits or not edits else tuple(each for each in edits if each)


@contextmanager
def _setting_to_none(copied: Copied) -> Iterator[None]:
    def always(function: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            function(owner, set_to_none=True)

        return zero_grad

    with ExitStack() as stack:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            stack.enter_context(replaced(owner, "zero_grad", always(owner.zero_grad)))
        yield


@contextmanager
def _stepping_with(name: str, value: bool, copied: Copied) -> Iterator[None]:
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    options = {"foreach": False if name == "fused" else value, "fused": name == "fused"}

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            known = {key: group[key] for key in options if key in group}
            before.append((group, known))
            group.update({key: options[key] for key in known})

    def end(*_: Any) -> None:
        while before:
            group, known = before.pop()
            group.update(known)

    handles = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        end()


def _in_backward(observed: Observed) -> Iterator[Change | Refusal]:
    name = "optimizer step in backward"
    kinds = list(observed.optimizers)
    if any(kind.__name__ in ("LBFGS", "SparseAdam") for kind in kinds):
        return
    if observed.reads_gradients:
        yield Refusal(
            name, "the step reads gradients between backward and step(), for example to clip them"
        )
    elif observed.accumulates:
        yield Refusal(name, "several backward passes add to one gradient")
    elif observed.until_step.because:
        yield Refusal(name, observed.until_step.because)
    elif observed.is_higher_order:
        yield Refusal(name, "the step keeps a graph for another backward pass")
    elif observed.backward_calls and all(site is not None for site in observed.optimizers.values()):
        yield Change(
            name,
            "optimizer",
            functools.partial(_updating, kinds),
            edits=_edits(
                observed,
                lambda site: wrapped(site, "step_in_backward(", ")", text_of(step_in_backward)),
            ),
            advice="update each parameter in a hook of "
            "torch.Tensor.register_post_accumulate_grad_hook, and free its gradient",
        )


@contextmanager
def _updating(kinds: list[type[torch.optim.Optimizer]], copied: Copied) -> Iterator[None]:
    handles: list[Any] = []
    making: list[object] = []

    def recorded(register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            handle = register(tensor, hook)
            if making:
                handles.append(handle)
            return handle

        return registered

    def wrapper(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)  # step_in_backward reads its signature
        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            if not making and type(optimizer) in kinds:
                making.append(True)
                try:
                    step_in_backward(optimizer)
                finally:
                    making.clear()

        return made

    register = torch.Tensor.register_post_accumulate_grad_hook
    with ExitStack() as stack:
        name = "register_post_accumulate_grad_hook"
        stack.enter_context(replaced(torch.Tensor, name, recorded(register)))
        for kind in kinds:
            stack.enter_context(replaced(kind, "__init__", wrapper(kind.__init__)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_KINDS = {torch.optim.Adam: "Adam", torch.optim.AdamW: "AdamW"}
_BITS = (8, 4)
_LEAST_SHARE = 0.1
"""Of what a step surely needs. torchao compiles its update, which takes longer than all other
trials together, so that it is tried only if it may save something."""


def offers_of_low_bits(observed: Observed) -> Iterator[Change | Refusal]:
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
            functools.partial(_trying_low_bits, kind, name),
            numbers=f"changes the results: optimizer states of {bits} bits",
            edits=None if edit is None else (edit,),
            advice=f"use torchao.optim.{name} instead of {kind.__name__}",
            rounds_updates=True,
        )


def _may_save(observed: Observed) -> bool:
    """Whether an optimizer's two states of each parameter are a large share of the memory."""
    states = 2 * observed.state_bytes
    saved = sum(sum(root.saved_bytes.get(root.kind, ())) for root in observed.roots)
    return states > 0 and states >= _LEAST_SHARE * (2 * states + saved)


@contextmanager
def _trying_low_bits(
    kind: type[torch.optim.Optimizer], name: str, copied: Copied
) -> Iterator[None]:
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
