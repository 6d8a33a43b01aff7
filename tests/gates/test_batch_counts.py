"""Retained memory after 1, 2, 4, 8 and 16 batches."""

import pytest

from cka import CKA

BATCH_COUNTS = (1, 2, 4, 8, 16)


@pytest.mark.slow
@pytest.mark.zero_retention
def test_retention_does_not_depend_on_the_number_of_batches(cka_memory, make_model, loader):
    """For every number of batches a comparison of a new model retains nothing."""
    # Smaller batches save time on a CPU; growth does not depend on the batch size.
    batch_size = 8 if cka_memory.device.type == "cpu" else 64

    def compare(model, images):
        with CKA(model, model, device=cka_memory.device) as cka:
            cka.compare(images, progress=False)

    sweep = cka_memory.sweep(
        compare, loader(batch_size, max(BATCH_COUNTS)), BATCH_COUNTS, setup=make_model
    )
    assert sweep.retained_mb == [0.0] * len(BATCH_COUNTS)
    assert sweep.growth_mb_per_batch == 0.0
    assert sweep.growth_over_batch_counts_mb == 0.0
