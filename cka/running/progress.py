"""The progress bar of a comparison."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm.auto import tqdm


class Progress:
    """A tqdm bar that counts batches. It never gets the batches, so it keeps none alive."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        """Start the bar.

        Args:
            total: number of batches; None if the loader has no length.
            shown: whether it is visible.
        """
        self._bar = tqdm(total=total, desc="CKA", unit="batch", disable=not shown)
        self._start = time.perf_counter()

    def batch_done(self, samples: int) -> None:
        """Count one batch; ``samples`` is the number of samples in all batches so far."""
        if self._bar.disable:
            return
        rate = samples / max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{samples} samples, {rate:.0f} samples/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
