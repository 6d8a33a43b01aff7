"""Growth on an accelerator, of loops that leave garbage in reference cycles."""

import pytest
from growth_programs import WAYS, KeepsOne, LeavesOne, check_random_loops, growth


@pytest.mark.parametrize("way", WAYS)
def test_growth_beside_garbage_is_exact(probe, way):
    """An object that is garbage only after the loop keeps 4096 bytes per batch, which is the
    growth.
    """
    device = str(probe.device)
    for batches in (8, 11, 15, 50):
        parts = lambda: [KeepsOne(device), LeavesOne(device, keeps_last=True)]  # noqa: E731
        assert growth(probe, parts, batches, way) == 4096, batches


def test_growth_of_random_loops_is_true_to_the_byte(probe):
    """In loops of 5 to 40 batches, cycles made before, in and after
    them do not change the growth.
    """
    check_random_loops(probe, str(probe.device), range(36))
