"""Why a kernel is not computed, or ends as it would on a card with an error."""

from __future__ import annotations


class NotComputed(Exception):  # noqa: N818  never leaves this package
    """The kernel uses something that has no meaning here; the text says what."""


class KernelError(Exception):
    """The kernel fails as it would on a card.

    Args:
        code: of the error, as CUDA's driver numbers it.
        problem: what happened.
    """

    ILLEGAL_ADDRESS = 700
    TIMEOUT = 702
    ASSERT = 710
    MISALIGNED_ADDRESS = 716

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code
