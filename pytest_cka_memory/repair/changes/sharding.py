"""``fully_shard``: each of several cards keeps a part of the parameters, gradients and states.

One process is rank 0 of a group that does not communicate. It allocates what a rank of a real group
does, so that this is tried where no values are computed: on an emulated device that has several
cards.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed

from pytest_cka_memory.repair.changes.checkpointing import repeated
from pytest_cka_memory.repair.edits import wrapped
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import Change, Copied, Refusal, replaced
from pytest_cka_memory.repair.written import sharded, text_of

NUMBERS = "changes the numbers: a mean over the batches of all cards"
_ORDER = 6


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``fully_shard`` for the models that are trained, if there are several cards."""
    cards = observed.cards
    if cards < 2 or observed.is_compiled or not distributed.is_available():
        return
    roots = [root for root in observed.roots if root.has_gradients and root.has_parameters]
    name = f"fully_shard over {cards} cards"
    if observed.has_values:
        yield Refusal(name, "it is tried without values only: add values=off to the device")
    elif observed.is_distributed:
        yield Refusal(name, "the step has a process group of its own")
    elif len({root.kind for root in roots}) == 1:
        yield _change(name, roots, cards)


def _change(name: str, roots: Sequence[Root], cards: int) -> Change:
    parts = repeated(roots[0])
    part = parts[0].__name__ if parts else None
    given = f', "{part}")' if part else ")"
    sites = {root.made_at for root in roots}
    return Change(
        name,
        "sharding",
        functools.partial(_trying, roots[0].kind, part, cards),
        numbers=NUMBERS,
        edits=None
        if None in sites
        else tuple(wrapped(site, "sharded(", given, text_of(sharded)) for site in sites if site),
        advice=f"call torch.distributed.fsdp.fully_shard for each {part or 'large part'} and for "
        "the model, before its optimizer is made",
        condition=f"it is started by torchrun --nproc-per-node {cards}, and each card has a batch",
        order=_ORDER,
        cards=cards,
    )


@contextmanager
def _trying(
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
