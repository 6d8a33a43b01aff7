"""Transformers: the batches of a ``Trainer`` become the batches of a region."""

from typing import Any

from transformers import TrainerCallback

from pytest_cka_memory.integrations.batch_sampling import BatchSampling
from pytest_cka_memory.measure.loaders_and_steps import size_of
from pytest_cka_memory.measure.region import Region


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Samples a region after each batch: ``Trainer(callbacks=[MemoryCallback(region)])``.

    While a model is trained, these are its training batches, without those of an evaluation;
    otherwise the batches of ``evaluate`` or ``predict``. With gradient accumulation, each
    accumulated batch is a batch, not each step of the optimizer.

    Args:
        region: an open region; each batch becomes a sample of it.

    Raises:
        TypeError: if `region` is not a region.

    Example:
        .. code-block:: python

            with cka_memory.measure("fit") as region:
                trainer = Trainer(callbacks=[MemoryCallback(region)], **settings)
    """

    def __init__(self, region: Region) -> None:
        self._batches = BatchSampling(region)
        self._is_training = False
        self._size: int | None = None
        """Items in the last batch. The trainer does not pass the batch to its callbacks."""
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the size of each batch from what the model is called with."""
        self._is_training = True
        self._remove_hook()  # an exception has ended an earlier training
        self._hook = kwargs["model"].register_forward_pre_hook(self._see_batch, with_kwargs=True)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample after a batch whose gradients are accumulated."""
        self._batches.sample(size=self._size)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample after a batch that ends with a step of the optimizer."""
        self._batches.sample(size=self._size)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample after a batch of an evaluation or prediction, unless a model is trained."""
        if not self._is_training:
            self._batches.sample()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hook that :meth:`on_train_begin` has registered."""
        self._is_training = False
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _see_batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batches.have_ended:  # an exception has ended the training
            self._remove_hook()
        elif module.training:
            self._size = size_of(kwargs or args)
