"""Find out whether a test failed because it compared the figures of its regions itself."""

import sys
import traceback
from types import FrameType

from pytest_cka_memory.core.figures import FIGURES
from pytest_cka_memory.measure.sweeps import Sweep

_NAMES = frozenset(
    (
        *(name for row in FIGURES.values() for name in (row.name, row.mb_name)),
        *(name for name in vars(Sweep) if "_mb" in name),
    )
)


def were_compared(error: AssertionError) -> bool:
    """Whether `error` comes from code that reads figures: ``assert region.retained_mb == 0``.

    The frame that raised it counts, or the one that called a method such as ``assertEqual``.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and _is_of_unittest(frames[-1]):
        frames.pop()
    return bool(frames) and not _NAMES.isdisjoint(frames[-1].f_code.co_names)


def _is_of_unittest(frame: FrameType) -> bool:
    unittest = sys.modules.get("unittest.case")  # not imported for a session that has no such test
    return unittest is not None and frame.f_globals is vars(unittest)
