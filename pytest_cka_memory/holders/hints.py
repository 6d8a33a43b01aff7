"""Advice on how to free a retained tensor, chosen by what references it."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.holders.search import Reference
from pytest_cka_memory.holders.torch_references import grad_fn_of, is_part_of_its_storage

UNOWNED = (
    "no tensor that a Python object references owns these bytes: they may be a library's "
    "workspace, or C++ code, such as an autograd graph, may hold them"
)
_NO_HOLDER = (
    "no Python holder found: C code references it; look for an autograd graph, a library's cache "
    "or an atexit callback"
)
_AUTOCAST = (
    "no Python holder found: autocast caches the weights that it has cast until its block ends; "
    "measure around the block, or write torch.autocast(..., cache_enabled=False)"
)
_PERHAPS_AUTOCAST = (
    "no Python holder found: C code references it, perhaps autocast, which caches the weights that "
    "it has cast until its block ends; measure around the block, or write torch.autocast(..., "
    "cache_enabled=False)"
)
_ATTACHED = "attached to its autograd graph: keep loss.item() or loss.detach() instead"
_ATTACHED_PART = (
    "attached to its autograd graph, and it uses only part of its storage: keep loss.item() or "
    "loss.detach().clone() instead"
)
_LOGGED = (
    "a log record keeps its arguments alive, and pytest keeps the record until the test ends: "
    "log loss.item() instead"
)
_PART = (
    "the tensor uses only part of its storage and keeps all of it alive, as views and the results "
    "of some losses do: keep a clone() of it instead"
)
_EXCEPTION = "a stored exception keeps its frames alive: store its text instead"
_CACHE = "a cache keeps its results alive: call cache_clear(), or do not cache tensors"
_PATTERNS = (
    (r"_hooks\b", "a hook was never removed: keep its handle and call handle.remove()"),
    (r"\.__traceback__|\.tb_frame", _EXCEPTION),
    (r"\.<functools.lru_cache>", _CACHE),
    (
        r"\.gi_frame",
        "a suspended generator keeps its local variables alive: exhaust it, or close() it",
    ),
    (
        r"\.cr_frame",
        "a suspended coroutine keeps its local variables alive: await it, or close() it",
    ),
    (
        r"\.ag_frame",
        "a suspended generator keeps its local variables alive: exhaust it, or aclose() it",
    ),
    (r"\.grad_fn\b|\._saved_", _ATTACHED),
    (
        r"\.state\[<",
        "an optimizer allocates its state in its first step: take one before measuring",
    ),
    (r"\.grad\b", "gradients stay allocated until optimizer.zero_grad() sets them to None"),
)
"""Pairs of a regular expression for the holder's expression and the advice if it matches."""


def hint_for(
    allocation: Allocation, path: Sequence[Reference] | None, held_by: str | None
) -> str | None:
    """Return the advice for one live storage; None if there is no particular advice.

    Args:
        allocation: the storage.
        path: the references from a root to its holder; None if the search found none.
        held_by: `path` as an expression.
    """
    if path is None or held_by is None:
        return _hint_without_holder(allocation)
    if any(issubclass(type(step.value), logging.LogRecord) for step in path):
        return _LOGGED
    for pattern, advice in _PATTERNS:
        if re.search(pattern, held_by):
            return advice
    return _hint_for_holder(path[-1].value)


def _hint_without_holder(allocation: Allocation) -> str:
    """Return the advice for a storage that no Python object references."""
    operator = None if allocation.site is None else allocation.site.operator
    if operator not in (None, "aten._to_copy") or not _autocast_is_caching():
        return UNOWNED if allocation.may_be_unowned else _NO_HOLDER
    return _PERHAPS_AUTOCAST if operator is None else _AUTOCAST


def _autocast_is_caching() -> bool:
    """Whether this thread is in a block of autocast, at whose end torch empties its cache."""
    import torch

    torch.autocast_increment_nesting()
    blocks: int = torch.autocast_decrement_nesting()
    return blocks > 0 and torch.is_autocast_cache_enabled()


def _hint_for_holder(holder: Any) -> str | None:
    """Return advice that follows from the last object of the path, if that is a tensor."""
    import torch

    from pytest_cka_memory.meters import torch_private

    if not issubclass(type(holder), torch.Tensor):
        return None
    with torch_private.no_subclass_function():
        is_attached = grad_fn_of(holder) is not None
    if is_part_of_its_storage(holder):
        return _ATTACHED_PART if is_attached else _PART
    return _ATTACHED if is_attached else None
