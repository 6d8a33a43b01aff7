"""Accelerate: the batches of a prepared loader become the batches of a region."""

from collections.abc import Iterable
from typing import Any

from pytest_cka_memory.measure.region import Region


def batches(region: Region, accelerator: Any, loader: Iterable[Any]) -> Any:
    """Return ``region.batches(accelerator.prepare(loader))``: the loader, prepared and sampled.

    The other order does not work: ``prepare`` builds a new loader from the data set of the one that
    it is given, and nothing of that one remains. A loader that has been prepared already is used
    as it is.

    Args:
        region: an open region.
        accelerator: an ``accelerate.Accelerator``.
        loader: a loader that it prepares.

    Returns:
        The loader that `accelerator` has made, with the same attributes, which samples `region` at
        each batch.

    Example:
        .. code-block:: python

            with cka_memory.measure("train") as region:
                for batch in batches(region, accelerator, loader):
                    train(model, batch)
    """
    return region.batches(accelerator.prepare(loader))
