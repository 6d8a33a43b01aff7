"""40 changes that need more memory are named by term and line; of 40 that do not, none is."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.limits.laws import difference, to_dict

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("imports_excluded_from_search")]

KNOWS_EXPRESSIONS = sys.version_info >= (3, 11)
"""Whether Python knows which part of a line ran."""
WIDTH = 16
Change = Callable[[torch.Tensor, int, int], Any]


class Steps:
    """Training steps into which a change can be put; its result is kept to the end."""

    def __init__(self) -> None:
        self.layer, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 40)
        self.embedding = torch.nn.Embedding(40, WIDTH)

    def linear(self, change: Change, batch: int, seq: int) -> None:
        x = torch.zeros(batch, seq, WIDTH)
        hidden = self.layer(x).relu()
        kept = change(hidden, batch, seq)
        hidden.sum().backward()
        del kept

    def attention(self, change: Change, batch: int, seq: int) -> None:
        x = self.layer(torch.zeros(batch, seq, WIDTH))
        scores = x @ x.transpose(1, 2)
        mixed = scores.softmax(-1) @ x
        kept = change(mixed, batch, seq)
        mixed.sum().backward()
        del kept

    def language(self, change: Change, batch: int, seq: int) -> None:
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        hidden = self.layer(self.embedding(tokens))
        kept = change(hidden, batch, seq)
        logits = self.head(hidden)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        del kept

    def recurrent(self, change: Change, batch: int, seq: int) -> None:
        x = torch.zeros(batch, seq, WIDTH)
        state, found = torch.zeros(batch, WIDTH), []
        for position in range(seq):
            state = torch.tanh(self.layer(x[:, position]) + state)
            found.append(state)
        stacked = torch.stack(found, 1)
        kept = change(stacked, batch, seq)
        stacked.sum().backward()
        del kept


STEPS = ("linear", "attention", "language", "recurrent")
# A row: the change, the code of its line, and the term that grows: powers of batch and seq.
PLANTED: dict[str, tuple[Change, str, str]] = {
    "mask": (lambda x, b, s: torch.zeros(s, s), "torch.zeros(s, s)", "seq²"),
    "bool-mask": (
        lambda x, b, s: torch.ones(s, s, dtype=torch.bool),
        "torch.ones(s, s, dtype=torch.bool)",
        "seq²",
    ),
    "mask-per-item": (lambda x, b, s: torch.zeros(b, s, s), "torch.zeros(b, s, s)", "batch · seq²"),
    "distances": (lambda x, b, s: torch.cdist(x, x), "torch.cdist(x, x)", "batch · seq²"),
    "differences": (
        lambda x, b, s: x.unsqueeze(2) - x.unsqueeze(1),
        "x.unsqueeze(2) - x.unsqueeze(1)",
        "batch · seq²",
    ),
    "float64": (lambda x, b, s: x.double(), "x.double()", "batch · seq"),
    "repeat": (
        lambda x, b, s: torch.zeros(1, s, 8).repeat(b, 1, 1),
        "torch.zeros(1, s, 8).repeat(b, 1, 1)",
        "batch · seq",
    ),
    "one-hot": (
        lambda x, b, s: F.one_hot(torch.zeros(b, s, dtype=torch.long), 9),
        "F.one_hot(",
        "batch · seq",
    ),
    "clone": (lambda x, b, s: x.detach().clone(), "x.detach().clone()", "batch · seq"),
    "per-batch": (lambda x, b, s: torch.zeros(b, 100), "torch.zeros(b, 100)", "batch"),
}
CLEAN: dict[str, Change] = {
    "nothing-more": lambda x, b, s: None,
    "view": lambda x, b, s: x.view(b * s, WIDTH),
    "expand": lambda x, b, s: x[:1].expand(b, s, WIDTH),
    "transpose": lambda x, b, s: x.transpose(0, 1),
    "detach": lambda x, b, s: x.detach(),
    "narrow": lambda x, b, s: x.narrow(1, 0, s // 2),
    "chunks": lambda x, b, s: x.chunk(2, 1),
    "unsqueeze": lambda x, b, s: x.unsqueeze(2),
    "diagonal": lambda x, b, s: x.diagonal(dim1=1, dim2=2),
    "no-tensor": lambda x, b, s: [0] * (b * s),
}


@cache
def steps() -> Steps:
    return Steps()


def law_of(name: str, change: Change) -> dict[str, Any]:
    """Return the law of a step with a change."""
    step = getattr(steps(), name)
    law = MemoryProbe("cpu").law(
        lambda batch, seq: step(change, batch, seq), batch=(1, 2, 4), seq=(8, 16, 32)
    )
    assert law.is_exact
    return to_dict(law)


@cache
def committed(name: str) -> dict[str, Any]:
    return law_of(name, CLEAN["nothing-more"])


@pytest.mark.parametrize("change", PLANTED)
@pytest.mark.parametrize("name", STEPS)
def test_planted_change_is_named_by_term_and_line(name: str, change: str) -> None:
    """The term that rose, with the code of its line."""
    planted, code, term = PLANTED[change]
    message = difference(committed(name), law_of(name, planted))
    assert f"{term}: " in message.partition("What rose: ")[2]
    line = planted.__code__.co_firstlineno
    made = code if KNOWS_EXPRESSIONS else f"test_planted_changes.py:{line} in <lambda>"
    assert made in message


@pytest.mark.parametrize("change", CLEAN)
@pytest.mark.parametrize("name", STEPS)
def test_change_that_needs_no_memory_is_not_accused(name: str, change: str) -> None:
    """Views, and objects without a tensor."""
    assert difference(committed(name), law_of(name, CLEAN[change])) == ""
