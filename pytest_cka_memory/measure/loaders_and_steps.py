"""Where batches end: in wrappers of data loaders, or at the steps of optimizers.

For its consumer a wrapper looks like the loader itself. The steps of optimizers are for code whose
loop cannot be reached.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from itertools import islice
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.meters.collector import not_counted
from pytest_cka_memory.units import counted

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


_OWN = frozenset(("_loader", "_batch_done", "_loop_done", "_running", "_count", "__class__"))


class _LoaderProxy:
    """Behaves like the loader it wraps: attributes, ``len``, indexing and ``isinstance``."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet while the proxy is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)

    @property  # type: ignore[misc]  # a read-only property
    def __class__(self) -> Any:
        # Consumers check isinstance(loader, DataLoader) and reject other types.
        return type(self._loader)


class SampledLoader(_LoaderProxy):
    """Calls ``batch_done(size)`` when its consumer has finished a batch and asks for the next.

    It calls ``loop_done(ahead)`` when there is no next one: see :func:`fetched_ahead`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batch_done: Callable[[int | None], None],
        loop_done: Callable[[int | None], object] = lambda ahead: None,
    ) -> None:
        super().__init__(loader)
        self._batch_done = batch_done
        self._loop_done = loop_done
        self._running: Iterator[Any] | None = None

    def __next__(self) -> Any:
        """Return the next batch of a loader that is an iterator, as the loader itself does."""
        if self._running is None:
            if iter(self._loader) is not self._loader:
                raise TypeError(f"{type(self._loader).__name__!r} object is not an iterator")
            self._running = iter(self)
        return next(self._running)

    def __iter__(self) -> Iterator[Any]:
        return self._sampled(iter(self._loader))

    @not_counted
    def _sampled(self, batches: Iterator[Any]) -> Iterator[Any]:
        return self._each(map(_boxed, batches))

    def _each(self, boxes: Iterator[list[Any]]) -> Iterator[Any]:
        for box in boxes:
            size = size_of(box[0])
            # Popped, so that this frame does not keep the batch alive when its consumer drops it.
            yield box.pop()
            self._batch_done(size)
        self._loop_done(fetched_ahead(self._loader))


class FirstBatches(_LoaderProxy):
    """The first `count` batches of a loader.

    Raises:
        ValueError: on iteration, if a loader without a length ends before `count`.
    """

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        super().__init__(loader)
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        batches_taken = 0

        def count(batch: Any) -> Any:
            nonlocal batches_taken
            batches_taken += 1
            return batch

        # A loop over the batches would keep the last one alive in this frame.
        yield from map(count, islice(self._loader, self._count))
        if batches_taken < self._count:  # an exhausted iterator or a short stream
            raise ValueError(
                f"the loader ended after {batches_taken} of {counted(self._count, 'batch')}; pass "
                "one that can be iterated more than once and has enough batches"
            )

    def __len__(self) -> int:
        return min(self._count, super().__len__())


def _boxed(batch: Any) -> list[Any]:
    return [batch]


def size_of(batch: Any) -> int | None:
    """Return the items in a batch: the first dimension of its first tensor, its length, or None."""
    try:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else None
    except (RuntimeError, TypeError, ValueError):  # a nested tensor has no shape, but a length
        return int(batch.size(0))
    if isinstance(batch, Mapping):  # Hugging Face's BatchEncoding is not a dict
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        sizes = (size_of(part) for part in batch if not isinstance(part, str))
        return next((size for size in sizes if size is not None), len(batch))
    return None


def fetched_ahead(loader: Any) -> int | None:
    """Return how many batches the workers of a DataLoader fetch before they are asked for.

    A progress bar such as tqdm's may be around it; None for other iterables.
    """
    try:
        loader = getattr(loader, "iterable", loader)
        workers, of_each = (getattr(loader, it, None) for it in ("num_workers", "prefetch_factor"))
    except Exception:  # the user's code may compute attributes
        return None
    if workers == 0:
        return 0
    return workers * of_each if isinstance(workers, int) and isinstance(of_each, int) else None


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None if the loader does not know it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset
        return None


class StepBoundaries:
    """The optimizer steps that are batch boundaries of one region; `label` is that of the region.

    A region does not reference itself through this, so that it is freed with its last reference.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_counting = False
        self._unused: list[EachStep] = []

    def each(self, optimizers: Sequence[Any], done: Callable[[], object]) -> "EachStep":
        """Return a context that calls `done` at each boundary.

        Args:
            optimizers: those whose steps count; every optimizer if there are none.
            done: samples the region.

        Raises:
            TypeError: if one of them is not an optimizer.
        """
        context = EachStep(self, optimizers, done)
        self._unused.append(context)
        return context

    def begin(self, context: "EachStep") -> None:
        """Note that the block of `context` begins.

        Raises:
            RegionError: if the steps are counted already.
        """
        if context in self._unused:
            self._unused.remove(context)
        if self._is_counting:
            raise RegionError(
                f"region {self._label!r} already counts the steps of optimizers; pass all "
                "optimizers to one each_step(...), or write each_step() to count the steps of "
                "every optimizer"
            )
        self._is_counting = True

    def end(self) -> None:
        """Note that the block has ended."""
        self._is_counting = False

    def refuse_if_counting(self) -> None:
        """Refuse a boundary from elsewhere.

        Raises:
            RegionError: if the steps are counted, so that each batch would count twice.
        """
        if self._is_counting:
            raise RegionError(
                f"region {self._label!r} counts each batch twice: at the step of its optimizer "
                "(each_step), and by region.batches or batch_done; remove one of them"
            )

    def check_used(self) -> None:
        """Refuse a context that was never used.

        Raises:
            RegionError: if :meth:`each` was called without ``with``.
        """
        unused, self._unused = self._unused, []
        if unused:
            raise RegionError(
                f"region {self._label!r}: each_step(...) was called without 'with', so no step was "
                "counted; write 'with region.each_step():' around the code that trains"
            )


class EachStep(AbstractContextManager[None]):
    """Counts the steps of optimizers while its ``with`` block runs.

    Optimizers that step in turn, as those of a GAN, make one boundary for each turn: an optimizer
    has its turn again when it steps a second time. It holds weak references only.
    """

    def __init__(
        self, boundaries: StepBoundaries, optimizers: Sequence[Any], done: Callable[[], object]
    ) -> None:
        self._boundaries = boundaries
        self._done = done
        counted = [_unwrapped(optimizer) for optimizer in optimizers]
        self._counted = WeakSet(counted) if counted else None
        """None if those of every optimizer are."""
        self._turn: WeakSet[Optimizer] = WeakSet()
        """The optimizers that have stepped since the last boundary, with the one that made it."""
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._boundaries.begin(self)
        try:
            self._turn = WeakSet()
            # Disabled, because torch.compile would otherwise trace the hook of a compiled step.
            hook = torch.compiler.disable(self._step_done)
            self._hook = register_optimizer_step_post_hook(hook)
        except BaseException:
            self._boundaries.end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._boundaries.end()
        if self._hook is not None:
            self._hook.remove()

    def _step_done(self, optimizer: "Optimizer", args: object, kwargs: object) -> None:
        if self._counted is not None and optimizer not in self._counted:
            return
        if _is_part_of_a_step(optimizer):
            return
        is_boundary = not self._turn or optimizer in self._turn
        if is_boundary:
            self._turn = WeakSet()
        self._turn.add(optimizer)
        if is_boundary:
            self._done()

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "each_step() cannot be iterated over; write 'with region.each_step():' around the code "
            "that trains, or loop over region.batches(loader)"
        )


def _unwrapped(optimizer: Any) -> "Optimizer":
    """Return the optimizer that steps: Accelerate's, for one, passes the step on to another.

    Raises:
        TypeError: if it is not an optimizer.
    """
    from torch.optim import Optimizer

    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"each_step takes optimizers, not {type(optimizer).__name__}; write "
            "'with region.each_step(optimizer):', or each_step() for every optimizer. For a loader "
            "write 'for batch in region.batches(loader):'"
        )
    return optimizer


def _is_part_of_a_step(optimizer: "Optimizer") -> bool:
    """Whether the step that has just ended runs inside another one of the same optimizer.

    torch wraps the ``step`` of a class when its first instance is made. If the step of a subclass
    calls that of its base class, both may be wrapped, and each wrapper calls the hooks.
    """
    from torch.optim import Optimizer

    wrapper = Optimizer.profile_hook_step(Optimizer.step).__code__
    running = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is wrapper and frame.f_locals.get("self") is optimizer:
            running += 1
        frame = frame.f_back
    return running > 1
