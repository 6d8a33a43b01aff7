"""States that each batch computes from their last value, so that they grow."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

Loop = Callable[[Callable[[], None]], None]


class State(NamedTuple):
    """A loop with a state that grows, what it is called, and the code that makes it."""

    loop: Loop
    """Calls its argument at the end of each batch."""
    variable: str
    made: str
    advice: str


STATES: list[State] = []
LARGER = "each batch replaces `{}` by a larger one; limit its length"
LOSS = "add loss.item() to the sum"
DETACH = "detach it in each batch, as in `{0} = {0}.detach()`"
BATCHES = 16


def state(variable: str, made: str, advice: str) -> Callable[[Loop], Loop]:
    """Add the decorated loop to the table."""

    def add(loop: Loop) -> Loop:
        STATES.append(State(loop, variable, made, advice.format(variable)))
        return loop

    return add


class Net(nn.Module):
    """A layer, and state of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.seen = torch.zeros(0, 10)
        self.hidden = torch.zeros(4, 10)
        self.register_buffer("scores", torch.zeros(0))


@state("history", "torch.cat([history, torch.ones(100)])", LARGER)
def history_in_a_local(batch_done: Callable[[], None]) -> None:
    history = torch.zeros(0)
    for _ in range(BATCHES):
        history = torch.cat([history, torch.ones(100)])
        batch_done()


@state("net.seen", "torch.vstack([net.seen, torch.ones(4, 10)])", LARGER)
def rows_in_an_attribute(batch_done: Callable[[], None]) -> None:
    net = Net()
    for _ in range(BATCHES):
        net.seen = torch.vstack([net.seen, torch.ones(4, 10)])
        batch_done()


@state("net.scores", "torch.cat((net.scores, torch.ones(40)))", LARGER)
def scores_in_a_buffer(batch_done: Callable[[], None]) -> None:
    net = Net()
    for _ in range(BATCHES):
        net.scores = torch.cat((net.scores, torch.ones(40)))
        batch_done()


@state("cache['key']", "torch.cat([cache['key'], torch.ones(1, 10, 8)], dim=1)", LARGER)
def keys_in_a_dict(batch_done: Callable[[], None]) -> None:
    cache = {"key": torch.zeros(1, 0, 8)}
    for _ in range(BATCHES):
        cache["key"] = torch.cat([cache["key"], torch.ones(1, 10, 8)], dim=1)
        batch_done()


@state("padded", "nn.functional.pad(padded, (0, 100))", LARGER)
def padded_state(batch_done: Callable[[], None]) -> None:
    padded = torch.zeros(0)
    for _ in range(BATCHES):
        padded = nn.functional.pad(padded, (0, 100))
        batch_done()


@state("part", "torch.from_numpy(np.append(rows, ones))", LARGER)
def array_that_is_appended(batch_done: Callable[[], None]) -> None:
    rows, ones = np.zeros(0, np.float32), np.ones(100, np.float32)
    for _ in range(BATCHES):
        part = torch.from_numpy(np.append(rows, ones))
        rows = part.numpy()
        batch_done()


@state("total", "total + loss", LOSS)
def sum_of_losses(batch_done: Callable[[], None]) -> None:
    weight, total = nn.Parameter(torch.ones(250)), torch.zeros(())
    for _ in range(BATCHES):
        loss = weight.exp().sum()
        total = total + loss
        batch_done()


@state("net.total", "net.total + net.layer(torch.ones(4, 10)).exp().mean()", LOSS)
def sum_in_an_attribute(batch_done: Callable[[], None]) -> None:
    net = Net()
    net.total = torch.zeros(())
    for _ in range(BATCHES):
        net.total = net.total + net.layer(torch.ones(4, 10)).exp().mean()
        batch_done()


@state("net.hidden", "torch.tanh(net.layer(net.hidden))", DETACH)
def hidden_state_of_a_recurrent_net(batch_done: Callable[[], None]) -> None:
    net = Net()
    for _ in range(BATCHES):
        net.hidden = torch.tanh(net.layer(net.hidden))
        batch_done()


@state("average", "0.9 * average + 0.1 * weight.exp()", DETACH)
def moving_average_with_a_graph(batch_done: Callable[[], None]) -> None:
    weight, average = nn.Parameter(torch.ones(250)), torch.zeros(250)
    for _ in range(BATCHES):
        average = 0.9 * average + 0.1 * weight.exp()
        batch_done()


@state("total", "", LOSS)
def sum_in_place(batch_done: Callable[[], None]) -> None:
    weight, total = nn.Parameter(torch.ones(250)), torch.zeros(())
    for _ in range(BATCHES):
        total += weight.exp().sum()
        batch_done()
