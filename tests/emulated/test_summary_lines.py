"""What ``python -m emulated_cuda`` says of a reserve that is much larger than what is in use."""

import pytest

from emulated_cuda import running
from emulated_cuda.cards import CARDS
from emulated_cuda.loading.records import DeviceUse, ProcessUse

MB = 2**20


@pytest.mark.parametrize(
    ("allocated_mb", "reserved_mb", "is_warned"),
    [
        (336, 13_800, True),
        (6_000, 12_000, False),  # twice as much
        (100, 7_000, False),  # less than a tenth of the card
        (None, 13_800, False),
    ],
)
def test_reserve_that_nobody_uses_is_warned_of(
    allocated_mb: int | None, reserved_mb: int, is_warned: bool
) -> None:
    """Only a reserve of more than twice what is in use, and more than a tenth of the card."""
    allocated_bytes = None if allocated_mb is None else allocated_mb * MB
    device = DeviceUse(1, reserved_mb * MB, 0, allocated_bytes, ran_out=False)
    card = CARDS["h100"]
    process = ProcessUse(1, "train.py", None, card, card.total_bytes, True, (device,))
    line, *warnings = running.lines([process])
    assert line.endswith(": fits")
    assert [warning.startswith("warning: on cuda:1 more than twice") for warning in warnings] == (
        [True] * is_warned
    )
