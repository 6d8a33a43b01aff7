"""The changes that are tried, in modules of their kinds, and the table of all."""

from collections.abc import Callable, Iterator

from pytest_cka_memory.repair.changes import (
    activations,
    checkpointing,
    deletions,
    forwards,
    optimizers,
)
from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.trials import Change, Refusal

Offers = Callable[[Observed], Iterator[Change | Refusal]]
OFFERS: tuple[Offers, ...] = (
    activations.offers_without_graph,
    deletions.offers,
    checkpointing.offers,
    activations.offers_on_host,
    activations.offers_of_losses,
    activations.offers_in_place,
    optimizers.offers,
    activations.offers_of_batches,
    forwards.offers_of_precision,
    forwards.offers_of_attention,
    checkpointing.offers_of_shards,
    optimizers.offers_of_low_bits,
)
"""Functions that yield the changes of one kind, in the order in which these are tried."""


def offered(observed: Observed) -> tuple[list[Change], list[Refusal]]:
    """Return the changes that apply to an observed step, and those that would break it."""
    changes: list[Change] = []
    refusals: list[Refusal] = []
    for offers in OFFERS:
        for offer in offers(observed):
            if isinstance(offer, Change):
                changes.append(offer)
            else:
                refusals.append(offer)
    return changes, refusals
