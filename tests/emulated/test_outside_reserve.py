"""What processes had of a card beside the reserve, and what that says of one that fits."""

from pathlib import Path

import pytest

from emulated_cuda import cards, running
from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from emulated_cuda.estimating import Estimate
from emulated_cuda.loading.records import DeviceUse, ProcessUse

GIB = 2**30
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "emulated_cuda.md"


@pytest.mark.parametrize(
    ("card", "with_nccl", "least", "most"),
    [
        ("t4", False, 0.12, 0.19),
        ("a100", False, 0.40, 0.49),
        ("a100", True, 0.40, 1.62),
        ("h100", False, 0.66, 0.79),
        ("rtx5090", False, 0.12, 0.79),  # one process is no range: all cards count
        ("a10", False, 0.12, 0.79),
    ],
)
def test_range_is_that_of_the_generation(card, with_nccl, least, most):
    """Processes of the same compute capability count, if there are two at least."""
    found = cards.outside_reserve_of(CARDS[card], with_nccl=with_nccl)

    assert [round(size / GIB, 2) for size in found] == [least, most]


@pytest.mark.parametrize(
    ("left_bytes", "end"),
    [
        pytest.param(int(0.79 * GIB), ": fits", id="equal"),
        pytest.param(
            int(0.79 * GIB) - 1,
            ": fits, if the CUDA context and loaded kernels take no more than the 809.0 MB that "
            "remain; on such cards they took 675.8 MB to 809.0 MB",
            id="one-byte-less",
        ),
    ],
)
def test_fits_has_a_condition_if_the_rest_of_the_card_may_not_suffice(left_bytes, end):
    """The reserve suffices to say that it fits only if the rest holds the most that was seen."""
    card = CARDS["h100"]
    device = DeviceUse(0, card.total_bytes - left_bytes, 0, card.total_bytes // 2, ran_out=False)
    process = ProcessUse(1, "x.py", None, card, card.total_bytes, True, (device,))

    (line,) = running.lines([process])

    assert line.endswith(end)


def test_condition_of_a_rank_has_nccl():
    """A rank may have over a gigabyte beside the reserve."""
    card = CARDS["a100"]
    device = DeviceUse(0, card.total_bytes - GIB, 0, card.total_bytes // 2, ran_out=False)
    process = ProcessUse(1, "x.py", 0, card, card.total_bytes, True, (device,))

    (line,) = running.lines([process])

    assert line.endswith(
        "fits, if the CUDA context, loaded kernels and NCCL take no more than the 1,024.0 MB "
        "that remain; on such cards they took 409.6 MB to 1,658.9 MB"
    )


@pytest.mark.parametrize(("left_mb", "is_conditional"), [(800, True), (820, False)])
def test_estimate_has_the_condition_too(left_mb, is_conditional):
    """An estimate that fits says so only with the condition."""
    card = CARDS["h100"]
    reserved = card.total_bytes - left_mb * 2**20
    usable = card.total_bytes - CONTEXT_BYTES
    found = str(Estimate("a.py:f", {}, "h100", usable, reserved, reserved, fits=True))

    assert ("if the CUDA context" in found) is is_conditional


def test_page_has_each_process():
    """The table of the reference is that of the module."""
    rows = [
        f"| {row.card} | {row.ranks} | {row.gib:.2f} | [{row.year}]({row.source}) |"
        for row in cards.PUBLISHED_OUTSIDE_RESERVE
    ]

    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")
