"""Survivors of a region: who made them, and who holds them."""

import gc
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cka_memory.core.allocations import Allocation, UnownedBlock
from pytest_cka_memory.core.figures import Holding
from pytest_cka_memory.holders import expressions
from pytest_cka_memory.holders.roots import Root, context_root, frame_roots, module_roots
from pytest_cka_memory.holders.search import Step, search
from pytest_cka_memory.holders.torch_references import grad_fn_of, look_for_tensors

_PACKAGE = str(Path(__file__).parents[1])


class _One(NamedTuple):
    """A single storage, explained."""

    holding: Holding
    kind: tuple[object, ...]
    """Equal for storages of the same origin and the same kind of holder."""
    batch: int | None


def holdings(
    allocations: Iterable[Allocation], named: Mapping[str, Any], boundaries: Sequence[int] = ()
) -> tuple[Holding, ...]:
    """Group living `allocations` by origin and holder, largest first.

    Args:
        allocations: storages to explain; those that have died are left out.
        named: values a reader knows by name, such as a test's fixtures.
        boundaries: the ledger's serial number at each batch boundary.
    """
    living = {birth.key: birth for birth in allocations if birth.storage() is not None}
    was_enabled = gc.isenabled()
    gc.disable()  # a collection amid the search would only cost time
    try:
        ways = _search(living, named)
        return _grouped([_held(birth, ways.get(key), boundaries) for key, birth in living.items()])
    finally:
        if was_enabled:
            gc.enable()


def group_by_site(allocations: Iterable[Allocation]) -> tuple[Holding, ...]:
    """Group `allocations`, dead or alive, by origin alone, largest first."""
    return _grouped([_One(_born(birth), _origin(birth), None) for birth in allocations])


def unowned(rest_bytes: int, blocks: Iterable[UnownedBlock]) -> tuple[Holding, ...]:
    """Tell of `rest_bytes` that no tensor owns: by the line that allocated them, where known."""
    known: Counter[tuple[str, ...]] = Counter()
    for block in blocks:
        if block.frames:
            known[block.frames] += block.bytes
    told = [Holding(bytes=n, count=0, created_at=at, hint=_UNOWNED) for at, n in known.items()]
    unknown = rest_bytes - sum(known.values())
    if unknown > 0:
        told.append(Holding(bytes=unknown, count=0, hint=f"{_UNOWNED}; {_ASK_HISTORY}"))
    return tuple(sorted(told, key=lambda holding: -holding.bytes))


_UNOWNED = "no tensor owns these bytes, but a library's workspace or C++"
_ASK_HISTORY = "--cka-memory-snapshots=DIR records where they were allocated"


def _grouped(ones: Iterable[_One]) -> tuple[Holding, ...]:
    groups: dict[object, list[_One]] = {}
    for one in ones:
        groups.setdefault(one.kind, []).append(one)
    merged = []
    for members in groups.values():
        largest = max((one.holding for one in members), key=lambda holding: holding.bytes)
        size = sum(one.holding.bytes for one in members)
        batches = len({one.batch for one in members if one.batch is not None}) or None
        merged.append(replace(largest, bytes=size, count=len(members), batches=batches))
    return tuple(sorted(merged, key=lambda holding: -holding.bytes))


def _held(birth: Allocation, way: Sequence[Step] | None, boundaries: Sequence[int]) -> _One:
    held_by = expressions.written(way) if way else None
    holding = replace(_born(birth), held_by=held_by, hint=_hint(birth, way, held_by))
    batch = sum(serial < birth.serial for serial in boundaries) if boundaries else None
    return _One(holding, (_origin(birth), expressions.kind(held_by)), batch)


def _born(birth: Allocation) -> Holding:
    if birth.maker is None:
        return Holding(bytes=birth.bytes, count=1)
    operator, dtype, shape, frames = birth.maker
    return Holding(
        bytes=birth.bytes,
        count=1,
        dtype=dtype,
        shape=shape,
        operator=operator,
        created_at=frames,
    )


def _origin(birth: Allocation) -> tuple[object, ...]:
    """The line that made it; where no line is known, the operator."""
    if birth.maker is None:
        return ()
    return birth.maker.frames[:1] or (birth.maker.operator,)


def _search(keys: Collection[int], named: Mapping[str, Any]) -> dict[int, list[Step]]:
    if not keys:
        return {}
    roots = [*frame_roots(_is_own), context_root(), *module_roots()]
    told = [
        Root("", " (the test's)" if n == "self" else " (a fixture)", {n: named[n]}) for n in named
    ]
    early = [*told, *(root for root in roots if not root.is_library)]
    return search(look_for_tensors(), keys, early, [r for r in roots if r.is_library])


def _hint(birth: Allocation, way: Sequence[Step] | None, held_by: str | None) -> str | None:
    if way is None or held_by is None:
        return _AUTOCAST if _is_cast_by_autocast(birth) else _NOBODY
    if any(issubclass(type(step.value), logging.LogRecord) for step in way):
        return _LOGGED
    for pattern, advice in _PATTERNS:
        if re.search(pattern, held_by):
            return advice
    return _hint_of(way[-1].value)


def _is_cast_by_autocast(birth: Allocation) -> bool:
    """Whether autocast may hold it: a cast, on a device where an autocast that caches is on."""
    import torch

    storage = birth.storage()
    if storage is None or birth.maker is None or birth.maker.operator != "aten._to_copy":
        return False
    return torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(storage.device.type)


def _hint_of(holder: Any) -> str | None:
    """What the tensor that holds a storage says by itself."""
    import torch

    from pytest_cka_memory.meters import torch_private

    if not issubclass(type(holder), torch.Tensor):
        return None
    with torch_private.no_subclass_function():
        if grad_fn_of(holder) is not None:
            return _ATTACHED
        is_part = holder.layout is torch.strided and torch_private.is_view(holder)
        return _VIEW if is_part and holder.nbytes < holder.untyped_storage().nbytes() else None


_NOBODY = (
    "no Python holder found: C code holds it, such as an autograd graph, a library's cache, atexit"
)
_AUTOCAST = (
    "no Python holder found: autocast keeps the weights it has cast until it is left; measure "
    "around it, or write torch.autocast(..., cache_enabled=False)"
)
_ATTACHED = "attached to its autograd graph: keep loss.item() or loss.detach() instead"
_LOGGED = "a log record keeps its arguments, in pytest until the test ends: log loss.item()"
_VIEW = "a view keeps all of its base alive: keep a clone() of it"
_EXCEPTION = "a stored exception keeps its frames alive: store its text instead"
_CACHE = "a cache keeps its results: call cache_clear(), or do not cache tensors"
_PATTERNS = (
    (r"_hooks\b", "a hook was never removed: keep its handle and call handle.remove()"),
    (r"\.__traceback__|\.tb_frame", _EXCEPTION),
    (r"\.<functools.lru_cache>", _CACHE),
    (r"\.gi_frame", "a suspended generator keeps its locals: exhaust it, or close() it"),
    (r"\.cr_frame", "a suspended coroutine keeps its locals: await it, or close() it"),
    (r"\.ag_frame", "a suspended generator keeps its locals: exhaust it, or aclose() it"),
    (r"\.grad_fn\b|\._saved_", _ATTACHED),
    (r"\.state\[<", "optimizer state is born in the first step: take one before measuring"),
    (r"\.grad\b", "gradients stay until optimizer.zero_grad() sets them to None"),
)


def _is_own(filename: str) -> bool:
    return filename.startswith(_PACKAGE)
