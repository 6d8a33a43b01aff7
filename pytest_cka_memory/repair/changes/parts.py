"""Computed in parts: cross-entropy over a large vocabulary, and a batch as smaller ones."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_cka_memory.repair.changes.forwards import edits_of_roots, forward_of_roots
from pytest_cka_memory.repair.edits import with_callee
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Copied, Refusal
from pytest_cka_memory.repair.written import (
    MicroBatches,
    chunked_cross_entropy,
    in_micro_batches,
    text_of,
)

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
        _trying,
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
    given = {name for name, value in kwargs.items() if value is not None}
    return (
        len(args) == 2
        and args[0].dim() == 2
        and args[1].dim() == 1
        and kwargs.get("reduction", "mean") == "mean"
        and given <= {*_USABLE, "reduction"}
    )


@contextmanager
def _trying(copied: Copied) -> Iterator[None]:
    with _InParts():
        yield


_COUNTS = (2, 4)


def offers_of_batches(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield micro-batches for a model that returns its loss."""
    roots = [root for root in observed.roots if root.has_gradients]
    if len({root.kind for root in roots}) != 1 or observed.is_compiled:
        return
    if not all(root.returns_scalar and root.batch_size for root in roots):
        return
    sizes = {root.batch_size for root in roots}
    name = "{} micro-batches"
    if observed.batch_statistics:
        because = f"{observed.batch_statistics} computes its statistics over the whole batch"
        yield Refusal(name.format(2), because)
        return
    if observed.is_higher_order:
        yield Refusal(name.format(2), "a graph is kept for another backward pass")
        return
    numbers = LAST_DIGITS
    differing = next(filter(None, (root.numbers_of_parts for root in roots)), "")
    if differing:
        numbers = differing
    elif observed.has_dropout:
        numbers = "changes the numbers: dropout draws others"
    elif observed.draws:
        numbers = "changes the numbers: each part draws random numbers of its own"
    elif any(map(observed.mixing.concerns, sizes)):
        numbers = "changes the numbers: rows of the batch depend on each other"
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
                condition="each part has as many targets that ignore_index does not leave out",
                order=5,
            )


@contextmanager
def _in_batches(roots: list[Root], count: int, copied: Copied) -> Iterator[None]:
    with forward_of_roots(roots, in_micro_batches(count)):
        yield
