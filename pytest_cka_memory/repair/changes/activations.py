"""Fewer activations at once: less kept for backward, and losses and batches in parts.

Nothing is kept where nobody differentiates, less where activations overwrite their input, and what
is on the host is copied back. Cross-entropy over a large vocabulary, and a batch, can be computed
in parts.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_cka_memory.repair import (
    Site,
    calling_site,
    in_context,
    with_argument,
    with_callee,
    wrapped,
)
from pytest_cka_memory.repair.changes.forwards import (
    Forward,
    edits_of_roots,
    forward_of_roots,
)
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Copied, Refusal, calls_followed
from pytest_cka_memory.repair.written import (
    MicroBatches,
    chunked_cross_entropy,
    in_micro_batches,
    in_place,
    saved_on_host,
    text_of,
)


def offers_without_graph(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``no_grad`` for the calls of models that no backward pass reaches."""
    unused = [root for root in observed.roots if root.needs_gradients and not root.has_gradients]
    if unused:
        yield _without_gradients(unused, {root.called_at for root in unused}, "")
    # Those of a model that is trained elsewhere, as in an evaluation.
    trained = [root for root in observed.roots if root.has_gradients]
    reached = {site for root in trained for site, is_reached in root.calls.items() if is_reached}
    others = {site for root in trained for site in root.calls} - reached - {None}
    if others:
        names = ", ".join(sorted({site.function for site in others if site is not None}))
        roots = [root for root in trained if others & root.calls.keys()]
        yield _without_gradients(roots, others, f" in {names}")


def _without_gradients(roots: list[Root], sites: set[Site | None], where: str) -> Change:
    names = ", ".join(dict.fromkeys(root.kind.__name__ for root in roots))
    edits = []
    for site in sites - {None}:
        assert site is not None
        edits.append(
            in_context(site, "torch.no_grad()") or wrapped(site, "torch.no_grad()(lambda: ", ")()")
        )
    return Change(
        f"no_grad for {names}{where}",
        "gradients" + where,
        functools.partial(_without_graph, roots, sites if where else None),
        edits=None if None in sites else tuple(edits),
        advice="no backward pass uses its result: call it in torch.no_grad()",
    )


@contextmanager
def _without_graph(
    roots: list[Root], sites: set[Site | None] | None, copied: Copied
) -> Iterator[None]:
    def without_graph(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if sites is not None and calling_site() not in sites:
                return forward(*args, **kwargs)
            with torch.no_grad():
                return forward(*args, **kwargs)

        return run

    with forward_of_roots(roots, without_graph):
        yield


def offers_in_place(observed: Observed) -> Iterator[Change | Refusal]:
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


FLOPS_PER_HOST_BYTE = 2 * 9_750
"""What a card computes while a byte is copied to the host and back.

312 TFLOP/s (bfloat16, dense) over 32 GB/s (16 lanes of PCIe 4.0, each way), both of NVIDIA's data
sheet of the A100. By those of the RTX 4090 it is half as much, of the H100 SXM half as much again.
Programs reach about half of the former rate, and of the latter without pinned memory even less.
"""


def offers_on_host(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``save_on_cpu`` around the models that are trained, unless they are on the host."""
    roots = [root for root in observed.roots if root.has_gradients]
    if not roots or observed.device == "cpu" or observed.is_compiled:
        return
    yield Change(
        "save activations on the host",
        "host",
        functools.partial(_saving_on_host, roots, observed.has_values),
        edits=edits_of_roots(roots, "saved_on_host", "saved_on_host", text_of(saved_on_host)),
        advice="call the model in torch.autograd.graph.save_on_cpu()",
        order=2,
    )


@contextmanager
def _saving_on_host(roots: list[Root], has_values: bool, copied: Copied) -> Iterator[None]:
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
        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
            copied.bytes += tensor.nbytes
            packed = torch.empty_like(tensor, device="meta")  # with the strides of tensor.cpu()
            if packed.stride() != tensor.stride():
                tensor.contiguous()  # as copying to the host does, for a moment
            return packed, tensor.device

        def unpack(saved: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
            packed, device = saved
            return torch.empty_like(packed, device=device)

        super().__init__(pack, unpack)


_LEAST_CLASSES = 1_000
_PARTS = 8
_USABLE = {"ignore_index", "label_smoothing"}


def offers_of_losses(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield the loss in parts, if it is over many classes."""
    large = [loss for loss in observed.losses if loss.classes >= _LEAST_CLASSES and loss.rows > 1]
    large = [loss for loss in large if loss.usable]
    if not large or not observed.backward_calls:
        return
    sites = {loss.site for loss in large}
    edits = [
        site and with_callee(site, "chunked_cross_entropy", text_of(chunked_cross_entropy))
        for site in sites
    ]
    yield Change(
        f"cross-entropy in {_PARTS} parts",
        "loss",
        _trying_parts,
        numbers=LAST_DIGITS,
        edits=None if None in edits else tuple(edit for edit in edits if edit),
        advice="compute the loss for parts of the rows, each in torch.utils.checkpoint.checkpoint",
        recomputes=True,
    )


class _InParts(TorchFunctionMode):
    """Computes large cross-entropies in parts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_large(func, args, kwargs):
            options = {name: value for name, value in kwargs.items() if name in _USABLE}
            return chunked_cross_entropy(*args, **options)
        return func(*args, **kwargs)


def _is_large(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call is one that can be computed in parts."""
    if func is not torch.nn.functional.cross_entropy or not _is_usable(args, kwargs):
        return False
    rows, classes = args[0].shape
    return bool(classes >= _LEAST_CLASSES and rows > 1)


def _is_usable(args: Any, kwargs: Any) -> bool:
    names = {name for name, value in kwargs.items() if value is not None}
    return (
        len(args) == 2
        and args[0].dim() == 2
        and args[1].dim() == 1
        and kwargs.get("reduction", "mean") == "mean"
        and names <= {*_USABLE, "reduction"}
    )


@contextmanager
def _trying_parts(copied: Copied) -> Iterator[None]:
    with _InParts():
        yield


_COUNTS = (2, 4)


def offers_of_batches(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield micro-batches for a model that returns its loss."""
    roots = [root for root in observed.roots if root.has_gradients and root.has_parameters]
    if len({root.kind for root in roots}) != 1 or observed.is_compiled:
        return
    sizes = {root.batch_size for root in roots}
    if 0 in sizes:
        return
    if not all(root.returns_scalar for root in roots):
        if max(sizes) > 1:
            yield Refusal(
                "micro-batches",
                f"{roots[0].kind.__name__} does not return its loss as a single tensor; to write "
                "them yourself, call backward() for each part, with its loss divided by their "
                "number",
            )
        return
    name = "{} micro-batches"
    if observed.batch_statistics:
        because = f"{observed.batch_statistics} computes its statistics over the whole batch"
        yield Refusal(name.format(2), because)
        return
    if observed.is_higher_order:
        yield Refusal(name.format(2), "the step keeps a graph for another backward pass")
        return
    numbers = LAST_DIGITS
    differing = next(filter(None, (root.numbers_of_parts for root in roots)), "")
    if differing:
        numbers = differing
    elif observed.has_dropout:
        numbers = "changes the results: dropout draws other numbers"
    elif observed.draws:
        numbers = "changes the results: each part draws random numbers of its own"
    elif any(map(observed.mixing.concerns, sizes)):
        numbers = "changes the results: rows of the batch depend on each other"
    for count in _COUNTS:
        if all(size % count == 0 for size in sizes):
            decorator = f"in_micro_batches({count})"
            yield Change(
                name.format(count),
                "micro-batches",
                functools.partial(_in_batches, roots, count),
                numbers=numbers,
                edits=edits_of_roots(
                    roots, decorator, decorator, text_of(MicroBatches), text_of(in_micro_batches)
                ),
                advice="call the model with parts of the batch, and divide each loss by the number "
                "of parts",
                condition="each part has the same number of targets that ignore_index does not "
                "leave out",
                order=5,
            )


@contextmanager
def _in_batches(roots: list[Root], count: int, copied: Copied) -> Iterator[None]:
    with forward_of_roots(roots, in_micro_batches(count)):
        yield
