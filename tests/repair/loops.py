"""Functions whose local variables hold tensors after their last use, for tests of ``del``."""

import torch
from torch import nn

SIZE = 2**18


def last_iteration():
    """The result of an iteration is live while the next one is computed."""
    model = nn.Linear(64, SIZE // 64)
    totals = []
    for _ in range(3):
        with torch.no_grad():
            out = model(torch.ones(64, 64))
        totals.append(float(out.sum()))
    return totals


def before_the_peak():
    """A tensor is live that only an earlier step needed."""
    model = nn.Linear(64, SIZE // 16)
    first = torch.ones(SIZE * 4)
    total = float(first.sum())
    with torch.no_grad():
        second = model(torch.ones(64, 64))
    return total + float(second.sum())


def three_before_the_peak():
    """Two of three tensors are live at the peak, and nothing needs them."""
    model = nn.Linear(64, SIZE // 16)
    first = torch.ones(SIZE * 4)
    second = torch.ones(SIZE * 2)
    total = float(first.sum() + second.sum())
    with torch.no_grad():
        third = model(torch.ones(64, 64)).relu()  # the peak
        total += float(third.sum())
        fourth = model(torch.ones(1, 64))
    return total + float(fourth.sum())


def assigned_in_the_last_line_of_a_block():
    """A ``with`` block and the loop around it both assign a result that nothing uses."""
    model = nn.Linear(64, SIZE // 64)
    total = 0.0
    for _ in range(3):
        with torch.no_grad():
            out, small = model(torch.ones(64, 64)), torch.ones(4)  # noqa: F841  # nothing uses it
        total += float(small.sum())
    return total


def same_name_twice():
    """Two functions hold a tensor of one name after its last use."""
    first = torch.ones(SIZE * 4)
    total = float(first.sum())
    return total + before_the_peak()


def used_later():
    """Nothing can be deleted: it is used at the end."""
    model = nn.Linear(64, SIZE // 64)
    first = torch.ones(SIZE)
    with torch.no_grad():
        second = model(torch.ones(64, 64))
    return float(first.sum() + second.sum())


def used_in_the_next_iteration():
    """The sum of an iteration begins with that of the last one."""
    model = nn.Linear(64, SIZE // 64)
    total = torch.zeros(64, SIZE // 64)
    for _ in range(3):
        with torch.no_grad():
            total = total + model(torch.ones(64, 64))


def captured():
    """A function that is called later reads it."""
    model = nn.Linear(64, SIZE // 64)
    first = torch.ones(SIZE)

    def later():
        return first.sum()

    with torch.no_grad():
        model(torch.ones(64, 64))
    return float(later())


def read_by_locals():
    """A variable is read without its name."""
    model = nn.Linear(64, SIZE // 64)
    first = torch.ones(SIZE)
    with torch.no_grad():
        model(torch.ones(64, 64))
    return len(locals())
