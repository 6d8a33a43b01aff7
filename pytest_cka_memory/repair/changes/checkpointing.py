"""Changes to chosen modules: activation checkpointing, and ``fully_shard``.

Checkpointing computes in backward again what forward would have saved. With ``fully_shard`` each of
several cards keeps a part of the parameters, gradients and states. One process is rank 0 of a group
that does not communicate. It allocates what a rank of a real group does, so that this is tried
where no values are computed: on an emulated device that has several cards.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

from pytest_cka_memory.repair import Edit, decorated, wrapped
from pytest_cka_memory.repair.changes.forwards import Forward, forward_of_class
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import (
    Change,
    Copied,
    Refusal,
    calls_followed,
    class_of,
    of_class,
    replaced,
)
from pytest_cka_memory.repair.written import (
    checkpoint_modules,
    checkpointed,
    keeping_products,
    sharded,
    text_of,
    with_forward,
)

GROUP = "checkpoint"
_MOST_CLASSES = 4
_ORDER = 1
_MOST_SWAPS = 40


@dataclass(frozen=True)
class Selection:
    """Modules of one class in a model that are checkpointed."""

    root: Root
    kind: type[torch.nn.Module]
    numbers: tuple[int, ...] | None = None
    """Numbers in the order of ``root.modules()``; None for all of them."""

    @property
    def count(self) -> int:
        """How many modules of the class the model has."""
        return self.root.classes[self.kind]


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield the changes that apply, and the classes that must not run twice."""
    if not observed.backward_calls or observed.is_compiled:
        return
    for root in observed.roots:
        if not root.has_gradients:
            continue
        for kind in repeated(root):
            name = f"checkpoint every {kind.__name__}"
            effect = observed.side_effects.get(kind)
            if effect and not effect.startswith(_BUFFERS):
                yield Refusal(name, f"{effect}, and a checkpoint runs forward twice")
                continue
            numbers = f"{effect}, and a checkpoint runs forward twice" if effect else ""
            yield change_for(Selection(root, kind), numbers)


_BUFFERS = "its forward changes the buffer"


def variants(change: Change) -> Iterator[Change]:
    """Yield cheaper forms of a change that checkpoints every module of a class."""
    selection = change.part
    assert isinstance(selection, Selection)
    for step in (2, 4):
        if selection.count >= 2 * step:
            numbers = tuple(range(0, selection.count, step))
            yield change_for(replace(selection, numbers=numbers), change.numbers)
    yield _selective(change, selection)


def repeated(root: Root) -> list[type[torch.nn.Module]]:
    """Return classes that save much and have several modules in the model, outermost first."""
    sizes = {
        kind: sum(saved)
        for kind, saved in root.saved_bytes.items()
        if len(saved) >= 2 and root.classes[kind] >= 2 and kind is not root.kind
    }
    with_parts = {
        kind
        for kind in sizes
        if any(kind in around for around in root.nested.values())  # it contains other modules
    }
    total = sum(root.saved_bytes.get(root.kind, [0]))
    large = [kind for kind in with_parts if sizes[kind] * 10 >= total]
    large.sort(key=lambda kind: (-sizes[kind], len(root.nested.get(kind, ()))))
    return large[:_MOST_CLASSES]


def change_for(selection: Selection, numbers: str = "") -> Change:
    """Return the change that checkpoints the selected modules."""
    kind = selection.kind
    return Change(
        _name(selection),
        GROUP,
        functools.partial(_trying, [selection], checkpointed),
        numbers=numbers,
        edits=_edits(selection),
        recomputes=True,
        order=_ORDER,
        part=selection,
        advice=f"wrap the calls of {kind.__name__} in torch.utils.checkpoint.checkpoint("
        "..., use_reentrant=False)",
    )


def _selective(every: Change, selection: Selection) -> Change:
    kind = selection.kind
    edit = decorated(kind.forward.__code__, "@keeping_products", text_of(keeping_products))
    return replace(
        every,
        name=f"checkpoint every {kind.__name__} but its matrix products",
        trying=functools.partial(_trying, [selection], keeping_products),
        edits=None if edit is None else (edit,),
        part=None,
        advice="use torch.utils.checkpoint.create_selective_checkpoint_contexts",
    )


def _name(selection: Selection) -> str:
    kind, numbers = selection.kind.__name__, selection.numbers
    if numbers is None:
        return f"checkpoint every {kind}"
    if numbers == tuple(range(0, selection.count, 2)):
        return f"checkpoint every 2nd {kind}"
    if numbers == tuple(range(0, selection.count, 4)):
        return f"checkpoint every 4th {kind}"
    return f"checkpoint {len(numbers)} of {selection.count} {kind}"


def _edits(selection: Selection) -> tuple[Edit, ...] | None:
    kind, made_at = selection.kind, selection.root.made_at
    if selection.numbers is None:
        edit = decorated(kind.forward.__code__, "@checkpointed", text_of(checkpointed))
        if edit is not None:
            return (edit,)
    if made_at is None:
        return None
    numbers = "" if selection.numbers is None else f", {_written(selection.numbers)}"
    after = f', "{kind.__name__}"{numbers})'
    helpers = (text_of(checkpointed), text_of(with_forward), text_of(checkpoint_modules))
    return (wrapped(made_at, "checkpoint_modules(", after, *helpers),)


def _written(numbers: Sequence[int]) -> str:
    """Return numbers as code: a range if they are one."""
    if len(numbers) > 1:
        step = numbers[1] - numbers[0]
        regular = range(numbers[0], numbers[-1] + 1, step)
        if tuple(regular) == tuple(numbers):
            start, end = regular[0], regular[-1] + 1
            ends = f"{end}" if step == 1 and not start else f"{start}, {end}"
            return f"range({ends})" if step == 1 else f"range({ends}, {step})"
    return f"({', '.join(map(str, numbers))},)"


@contextmanager
def _trying(
    selections: Sequence[Selection],
    wrapper: Callable[[Forward], Forward],
    copied: Copied,
) -> Iterator[None]:
    with ExitStack() as stack:
        for selection in selections:
            stack.enter_context(_one(selection, wrapper))
        yield


@contextmanager
def _one(selection: Selection, wrapper: Callable[[Forward], Forward]) -> Iterator[None]:
    if selection.numbers is None:
        with forward_of_class(selection.kind, wrapper):
            yield
        return
    chosen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    numbers = selection.numbers

    def begins(module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        if not outer and class_of(module) is selection.root.kind and module not in seen:
            seen.add(module)
            modules = of_class(module, selection.kind)
            chosen.update(modules[number] for number in numbers if number < len(modules))

    inner: AbstractContextManager[None] = forward_of_class(
        selection.kind, wrapper, chosen.__contains__
    )
    with calls_followed(begins), inner:
        yield


@contextmanager
def counting(every: Selection, again: Counter[int], total: Callable[[], int]) -> Iterator[None]:
    """Checkpoint all modules of a class, in the block, and count what each of them computes again.

    Args:
        every: the class, and the model that has its modules.
        again: number of a module -> by how much `total` rises while it is computed again; -1 for
            modules outside the model.
        total: returns what was computed so far.
    """
    numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def begins(module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        if not outer and class_of(module) is every.root.kind:
            numbers.update({each: n for n, each in enumerate(of_class(module, every.kind))})

    @contextmanager
    def counted(number: int) -> Iterator[None]:
        before = total()
        try:
            yield
        finally:  # torch ends it with an exception when it has what backward needs
            again[number] += total() - before

    def wrapper(forward: Forward) -> Forward:
        def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            number = numbers.get(module, -1)
            return checkpoint(
                forward,
                module,
                *args,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), counted(number)),
                **kwargs,
            )

        return run

    with calls_followed(begins), forward_of_class(every.kind, wrapper):
        yield


def fewest(
    every: Selection,
    fits: Callable[[Selection], bool],
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[int, ...] | None:
    """Return the fewest modules whose checkpoints fit, by running the step; None if none fit.

    Modules that save most come first, of equal ones those that run first: what the last one saves
    is computed again while everything else is still live. Then single modules are exchanged.
    """
    count = every.count
    saved = every.root.saved_bytes.get(every.kind, [])[:count]
    saved += [0] * (count - len(saved))
    ranked = sorted(range(count), key=lambda number: -saved[number])

    def chosen(numbers: Iterable[int]) -> bool:
        some = tuple(sorted(numbers))
        selection = replace(every, numbers=None if len(some) == count else some)
        return bool(some) and fits(selection)

    # All of them may need more than some: what one computes again is live beside the rest.
    some_that_fit = (
        size for size in range(count, 0, -1) if not is_late() and chosen(ranked[:size])
    )
    high = next(some_that_fit, 0)
    if not high:
        others = (some for size in range(1, count) for some in combinations(ranked, size))
        limited = islice(others, _MOST_SWAPS)
        return next((tuple(sorted(it)) for it in limited if not is_late() and chosen(it)), None)
    low = 0  # `high` fit, `low` do not
    while high - low > 1 and not is_late():
        middle = (low + high) // 2
        if chosen(ranked[:middle]):
            high = middle
        else:
            low = middle
    best = tuple(ranked[:high])
    tries = 0
    while len(best) > 1:
        for other in _neighbours(ranked, len(best) - 1):
            tries += 1
            if tries > _MOST_SWAPS or is_late():
                return tuple(sorted(best))
            if chosen(other):
                best = other
                break
        else:
            break
    return tuple(sorted(best))


def _neighbours(ranked: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """Yield other choices of `count` modules, those first that exchange one of the best."""
    first, rest = ranked[:count], ranked[count:]
    for new in rest:
        for number in range(count - 1, -1, -1):
            yield (*first[:number], *first[number + 1 :], new)
    yield from combinations(ranked, count)


NUMBERS = "changes the results: gradients are averaged over the batches of all cards"
_ORDER_OF_SHARDS = 6


def offers_of_shards(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``fully_shard`` for the models that are trained, if there are several cards."""
    cards = observed.cards
    if cards < 2 or observed.is_compiled or not distributed.is_available():
        return
    roots = [root for root in observed.roots if root.has_gradients and root.has_parameters]
    name = f"fully_shard over {cards} cards"
    if observed.has_values:
        yield Refusal(name, "it can be tried only without values; add values=off to the device")
    elif observed.is_distributed:
        yield Refusal(name, "the step makes its own process group")
    elif len({root.kind for root in roots}) == 1:
        yield _change_to_shards(name, roots, cards)


def _change_to_shards(name: str, roots: Sequence[Root], cards: int) -> Change:
    parts = repeated(roots[0])
    part = parts[0].__name__ if parts else None
    argument = f', "{part}")' if part else ")"
    sites = {root.made_at for root in roots}
    return Change(
        name,
        "sharding",
        functools.partial(_trying_shards, roots[0].kind, part, cards),
        numbers=NUMBERS,
        edits=None
        if None in sites
        else tuple(wrapped(site, "sharded(", argument, text_of(sharded)) for site in sites if site),
        advice=f"call torch.distributed.fsdp.fully_shard for each {part or 'large part'} and for "
        "the model, before you make the optimizer",
        condition=f"torchrun --nproc-per-node {cards} starts the program, and each card gets a "
        "batch",
        order=_ORDER_OF_SHARDS,
        cards=cards,
    )


@contextmanager
def _trying_shards(
    kind: type[torch.nn.Module], part: str | None, cards: int, copied: Copied
) -> Iterator[None]:
    def wrapper(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            if type(module) is kind:
                sharded(module, part)

        return made

    distributed.init_process_group("fake", rank=0, world_size=cards)
    with ExitStack() as stack:
        stack.callback(distributed.destroy_process_group)
        stack.enter_context(replaced(kind, "__init__", wrapper(kind.__init__)))
        yield
