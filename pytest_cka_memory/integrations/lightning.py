"""Lightning: the batches of a ``Trainer`` become the batches of a region."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pytest_cka_memory.integrations.batch_sampling import BatchSampling
from pytest_cka_memory.measure.region import Region

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Two distributions of the same code; each accepts its own class of callbacks only."""


class MemoryCallback:
    """Samples a region after each batch: ``Trainer(callbacks=[MemoryCallback(region)])``.

    While a model is fitted, these are its training batches, without those of validation; otherwise
    the batches of validation, test or prediction. An accumulated batch is a batch. The object is a
    callback of ``lightning`` and of ``pytorch_lightning``, whichever the user has imported.

    Args:
        region: an open region; each batch becomes a sample of it.

    Raises:
        TypeError: if `region` is not a region.
        ImportError: if neither is installed.

    Example:
        .. code-block:: python

            with cka_memory.measure("fit") as region:
                trainer = Trainer(callbacks=[MemoryCallback(region)], **settings)
    """

    def __new__(cls, region: Region) -> "MemoryCallback":
        names = tuple(name for name in _PACKAGES if name in sys.modules)
        return object.__new__(_callback_class(cls, names or _installed()))

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._batches = BatchSampling(region)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sample after a training batch."""
        self._batches.sample(batch)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: int, **_: int
    ) -> None:
        """Sample after a validation batch, unless a model is fitted."""
        if trainer.state.fn != "fit":
            self._batches.sample(batch)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: int, **_: int
    ) -> None:
        """Sample after a test batch."""
        self._batches.sample(batch)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: int, **_: int
    ) -> None:
        """Sample after a batch of prediction."""
        self._batches.sample(batch)


def _installed() -> tuple[str, ...]:
    installed = [name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ImportError(
            "MemoryCallback needs Lightning, but neither lightning nor pytorch_lightning is "
            "installed; install the one that the project uses"
        )
    return tuple(installed[:1])


_classes: dict[tuple[type[MemoryCallback], tuple[str, ...]], type[MemoryCallback]] = {}


def _callback_class(cls: type[MemoryCallback], packages: tuple[str, ...]) -> type[MemoryCallback]:
    """Return a class that is `cls` and a callback of each package; the same one every time."""
    if (cls, packages) not in _classes:
        bases = (import_module(package).Callback for package in packages)
        members = {"__doc__": cls.__doc__, "__module__": cls.__module__}
        _classes[cls, packages] = type(cls.__name__, (cls, *bases), members)
    return _classes[cls, packages]
