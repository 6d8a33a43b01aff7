"""The same step from smaller batches, whose gradients are added."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_cka_memory.repair.changes.forwards import edits_of_roots, forward_of_roots
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Copied, Refusal
from pytest_cka_memory.repair.written import MicroBatches, in_micro_batches, text_of

_COUNTS = (2, 4)


def offers(observed: Observed) -> Iterator[Change | Refusal]:
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
    for count in _COUNTS:
        if all(size % count == 0 for size in sizes):
            decorator = f"in_micro_batches({count})"
            yield Change(
                name.format(count),
                "micro-batches",
                functools.partial(_trying, roots, count),
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
def _trying(roots: list[Root], count: int, copied: Copied) -> Iterator[None]:
    with forward_of_roots(roots, in_micro_batches(count)):
        yield
