"""Wrap the ``forward`` of modules: in a trial, and as text for the user's files.

With it the changes that are little else: narrower types, and attention that keeps no weights.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_cka_memory.repair import Edit, decorated, wrapped
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import (
    LAST_DIGITS,
    Change,
    Copied,
    Refusal,
    calls_followed,
    class_of,
    replaced,
    with_own_forward,
)
from pytest_cka_memory.repair.written import text_of, with_bfloat16, with_forward
from pytest_cka_memory.units import counted, format_with_unit

Forward = Callable[..., Any]
Wrapper = Callable[[Forward], Forward]


@contextmanager
def forward_of_class(
    kind: type[torch.nn.Module],
    wrapper: Wrapper,
    chosen: Callable[[torch.nn.Module], bool] = lambda module: True,
) -> Iterator[None]:
    """Wrap the forward of the modules of one class that are chosen, in the block."""
    is_ended: list[bool] = []  # a class that is made in the block may keep the new forward

    def choosing(plain: Forward) -> Forward:
        changed = wrapper(plain)

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            wanted = not is_ended and class_of(module) is kind and chosen(module)
            return (changed if wanted else plain)(module, *args, **kwargs)

        return forward

    with ExitStack() as stack:
        stack.callback(is_ended.append, True)
        for owner in with_own_forward(kind):
            stack.enter_context(replaced(owner, "forward", choosing(owner.forward)))
        yield


@contextmanager
def forward_of_roots(roots: list[Root], wrapper: Wrapper) -> Iterator[None]:
    """Wrap the forward of the models, where they are called as such, in the block."""
    with ExitStack() as stack:
        calls = stack.enter_context(calls_followed())
        for kind in dict.fromkeys(root.kind for root in roots):
            stack.enter_context(
                forward_of_class(kind, wrapper, lambda module: calls.modules == [module])
            )
        yield


def edits_of_roots(
    roots: list[Root], decorator: str, wrap: str, *helpers: str
) -> tuple[Edit, ...] | None:
    """Return the edits that wrap the forward of models; None if the place is not known.

    Args:
        roots: the models.
        decorator: what is written above a forward of the user's.
        wrap: an expression for the wrapper, for a class that is not the user's.
        helpers: code that both need.
    """
    edits: dict[object, Edit] = {}
    for root in roots:
        edit = decorated(root.kind.forward.__code__, f"@{decorator}", *helpers)
        if edit is None and root.made_at is not None:
            after = f", {wrap})"
            edit = wrapped(root.made_at, "with_forward(", after, *helpers, text_of(with_forward))
        if edit is None:
            return None
        edits[edit.file, edit.insertions] = edit
    return tuple(edits.values())


_PRECISION = "precision"
_BFLOAT16 = "changes the results: bfloat16"


def offers_of_precision(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield autocast, and weights in bfloat16, for models in float32."""
    roots = [root for root in observed.roots if root.has_parameters]
    if not roots or observed.is_autocast or observed.half or observed.is_compiled:
        return
    device = observed.device
    cast = f'torch.autocast("{device}", dtype=torch.bfloat16)'
    yield Change(
        "bfloat16 autocast",
        _PRECISION,
        functools.partial(_autocasting, roots, device),
        numbers=_BFLOAT16,
        edits=edits_of_roots(roots, cast, cast),
        advice=f"call the model in {cast}",
        order=3,
    )
    sites = {root.made_at for root in roots}
    yield Change(
        "bfloat16 weights",
        _PRECISION,
        functools.partial(_converting, roots),
        numbers=_BFLOAT16,
        edits=None if None in sites else tuple(dict.fromkeys(map(_converted, roots))),
        advice="convert the model with .to(torch.bfloat16), and its inputs",
        rounds_updates=True,
        order=0,
    )


def _converted(root: Root) -> Edit:
    assert root.made_at is not None
    if not root.takes_floats:
        return wrapped(root.made_at, "", ".to(torch.bfloat16)")
    return wrapped(root.made_at, "with_bfloat16(", ")", text_of(with_bfloat16))


@contextmanager
def _autocasting(roots: list[Root], device: str, copied: Copied) -> Iterator[None]:
    def cast(forward: Forward) -> Forward:
        changed: Forward = torch.autocast(device, dtype=torch.bfloat16)(forward)
        return changed

    with forward_of_roots(roots, cast):
        yield


@contextmanager
def _converting(roots: list[Root], copied: Copied) -> Iterator[None]:
    takes_floats = {root.kind for root in roots if root.takes_floats}

    def wrapper(kind: type, init: Callable[..., None]) -> Callable[..., None]:
        def made(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            if type(module) is kind:
                (with_bfloat16 if kind in takes_floats else _to_bfloat16)(module)

        return made

    with ExitStack() as stack:
        for kind in dict.fromkeys(root.kind for root in roots):
            stack.enter_context(replaced(kind, "__init__", wrapper(kind, kind.__init__)))
        yield


def _to_bfloat16(module: torch.nn.Module) -> None:
    module.to(torch.bfloat16)


_BACKENDS = ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
_OF_16_BITS = {torch.bfloat16, torch.float16}
_IMPORT = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
"""


def offers_of_attention(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield each implementation that does not keep the attention weights."""
    for site, sizes in observed.own_attention.items():
        where = "of a library" if site is None else f"at {site}"
        yield Refusal(
            "scaled_dot_product_attention",
            f"it takes the place of several lines: the softmax {where} keeps attention weights, up "
            f"to {format_with_unit(max(sizes))} in each of {counted(len(sizes), 'call')}; write "
            "torch.nn.functional.scaled_dot_product_attention instead of both products, mask and "
            "softmax",
        )
    if not observed.attention or observed.device == "cpu" or observed.is_compiled:
        return
    if not observed.attention <= _OF_16_BITS:  # all but one take 16 bits only
        return
    for name in _BACKENDS:
        context = f"sdpa_kernel(SDPBackend.{name})"
        yield Change(
            f"attention by {name.partition('_')[0].lower()}",
            "attention",
            functools.partial(_by_backend, observed.roots, getattr(SDPBackend, name)),
            numbers=LAST_DIGITS,
            edits=edits_of_roots(observed.roots, context, context, _IMPORT),
            advice=f"call the model in torch.nn.attention.{context}",
            order=4,
        )


@contextmanager
def _by_backend(roots: list[Root], backend: SDPBackend, copied: Copied) -> Iterator[None]:
    def by_backend(forward: Forward) -> Forward:
        return sdpa_kernel(backend)(forward)

    with forward_of_roots(roots, by_backend):
        yield
