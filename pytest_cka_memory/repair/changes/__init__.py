"""The changes that are tried: one module for each kind, and the table of all."""

from collections.abc import Callable, Iterator
from importlib import import_module

from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.trials import Change, Refusal

OFFERS = (
    "gradients",
    "deletions",
    "checkpointing",
    "host",
    "losses",
    "activations",
    "optimizers",
    "micro_batches",
    "precision",
    "attention",
)
"""The modules, in the order in which their changes are tried; each has a function ``offers``."""

Offers = Callable[[Observed], Iterator[Change | Refusal]]


def offered(observed: Observed) -> tuple[list[Change], list[Refusal]]:
    """Return the changes that apply to an observed step, and those that would break it."""
    changes: list[Change] = []
    refusals: list[Refusal] = []
    for name in OFFERS:
        offers: Offers = import_module(f"{__name__}.{name}").offers
        for offer in offers(observed):
            if isinstance(offer, Change):
                changes.append(offer)
            else:
                refusals.append(offer)
    return changes, refusals
