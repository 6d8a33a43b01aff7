"""Survivors of a region: who made them, and who holds them."""

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_cka_memory import paths
from pytest_cka_memory.births import Birth
from pytest_cka_memory.references import Root, Step, frame_roots, module_roots, search
from pytest_cka_memory.region import Holding

if TYPE_CHECKING:
    import torch

_PACKAGE = str(Path(__file__).parent)


class _One(NamedTuple):
    """A single storage, explained."""

    holding: Holding
    kind: tuple[object, ...]
    """Equal for storages of the same origin and the same kind of holder."""
    batch: int | None


def holdings(
    births: Iterable[Birth], named: Mapping[str, Any], boundaries: Sequence[int] = ()
) -> tuple[Holding, ...]:
    """Group living `births` by origin and holder, largest first.

    Args:
        births: storages to explain; those that have died are left out.
        named: values a reader knows by name, such as a test's fixtures.
        boundaries: the ledger's serial number at each batch boundary.
    """
    living = {birth.key: birth for birth in births if birth.storage() is not None}
    was_enabled = gc.isenabled()
    gc.disable()  # a collection amid the search would only cost time
    try:
        ways = _search(living, named)
        return _grouped([_held(birth, ways.get(key), boundaries) for key, birth in living.items()])
    finally:
        if was_enabled:
            gc.enable()


def by_origin(births: Iterable[Birth]) -> tuple[Holding, ...]:
    """Group `births`, dead or alive, by origin alone, largest first."""
    return _grouped([_One(_born(birth), _origin(birth), None) for birth in births])


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


def _held(birth: Birth, way: Sequence[Step] | None, boundaries: Sequence[int]) -> _One:
    held_by = paths.written(way) if way else None
    holding = replace(_born(birth), held_by=held_by, hint=_hint(way, held_by))
    batch = sum(serial < birth.serial for serial in boundaries) if boundaries else None
    return _One(holding, (_origin(birth), paths.kind(held_by)), batch)


def _born(birth: Birth) -> Holding:
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


def _origin(birth: Birth) -> tuple[object, ...]:
    """The line that made it; where no line is known, the operator."""
    if birth.maker is None:
        return ()
    return birth.maker.frames[:1] or (birth.maker.operator,)


def _search(keys: Collection[int], named: Mapping[str, Any]) -> dict[int, list[Step]]:
    if not keys:
        return {}
    import torch

    from pytest_cka_memory.meters.storages import storages_of, with_subclasses

    tensor_types = with_subclasses(torch.Tensor)

    def found(value: Any) -> Collection[int]:
        if type(value) in tensor_types:
            return [storage._cdata for storage in storages_of(value)]
        return [value._cdata] if type(value) is torch.UntypedStorage else ()

    def more(value: Any) -> Iterator[tuple[str, Any]]:
        if type(value) in tensor_types:
            yield from _beyond_tensor(value)
        elif hasattr(type(value), "next_functions"):
            yield from _beyond_node(value)

    modules = list(module_roots())
    frames = list(frame_roots(_is_own))
    fixtures = Root("", " (a fixture)", dict(named))
    early = [fixtures, *(root for root in (*frames, *modules) if not root.is_library)]
    late = [root for root in (*frames, *modules) if root.is_library]
    return search(found, keys, early, late, more)


def _beyond_tensor(tensor: "torch.Tensor") -> Iterator[tuple[str, Any]]:
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        if tensor.grad_fn is not None:
            yield ".grad_fn", tensor.grad_fn
        if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
            yield ".grad", tensor.grad


def _beyond_node(node: Any) -> Iterator[tuple[str, Any]]:
    """What an autograd node leads to: its inputs' nodes, and the tensors it saved."""
    for index, (following, _) in enumerate(node.next_functions):
        if following is not None:
            yield f".next_functions[{index}][0]", following
    for name in dir(node):
        if name.startswith("_saved_") or name in ("variable", "saved_tensors"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # already freed
                continue
            if value is not None:
                yield f".{name}", value


def _hint(way: Sequence[Step] | None, held_by: str | None) -> str | None:
    if way is None or held_by is None:
        return (
            "no Python holder found: C++ holds it, such as an autograd graph or a library's cache"
        )
    for pattern, advice in _PATTERNS:
        if pattern in held_by:
            return advice
    holder = way[-1].value
    if getattr(holder, "grad_fn", None) is not None:
        return _ATTACHED
    return None


_ATTACHED = "attached to its autograd graph: keep loss.item() or loss.detach() instead"
_PATTERNS = (
    ("_hooks", "a hook was never removed: keep its handle and call handle.remove()"),
    ("__traceback__", "a stored exception keeps its frames alive: store its text instead"),
    ("tb_frame", "a stored exception keeps its frames alive: store its text instead"),
    ("lru_cache", "a cache keeps its results: call cache_clear(), or do not cache tensors"),
    ("gi_frame", "a suspended generator keeps its locals: exhaust it, or close() it"),
    ("cr_frame", "a suspended coroutine keeps its locals: await it, or close() it"),
    (".grad_fn", _ATTACHED),
    ("_saved_", _ATTACHED),
    (".state[<", "optimizer state is born in the first step: take one before measuring"),
    (".grad", "gradients stay until optimizer.zero_grad() sets them to None"),
)


def _is_own(filename: str) -> bool:
    return filename.startswith(_PACKAGE)
