"""What a region measures in addition to its device's memory, if it is asked for."""

from collections.abc import Callable, Collection, Iterable

from pytest_cka_memory.core.additional_figures import ADDITIONS, CYCLES, DRIVER, PROCESS, TIMELINE
from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.measure.addition import Addition
from pytest_cka_memory.meters import process
from pytest_cka_memory.meters.base import Meter, Peaks

Additions = Collection[str] | Callable[[], Collection[str]]
"""Names of additions, or a function that returns them when a region begins."""


def checked(names: Iterable[str]) -> Collection[str]:
    """Return `names` in the order of ``ADDITIONS``, each once; ``timeline`` is the last.

    Raises:
        MissingPackageError: if psutil is not installed and the process is to be measured.
        ValueError: if one is not the name of an addition.
    """
    given = [names] if isinstance(names, str) else list(names)
    known = (*ADDITIONS, TIMELINE)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"cannot measure {unknown[0]!r}; write one of {', '.join(known)}")
    if PROCESS in given and not process.is_available():
        raise MissingPackageError(process.INSTALL)
    return [name for name in known if name in given]


def begin(names: Iterable[str], peaks: Peaks, meter: Meter) -> list[Addition]:
    """Begin to measure the additions of these names, for the region that `peaks` belongs to."""
    return [_begun(name, peaks, meter) for name in checked(names)]


def _begun(name: str, peaks: Peaks, meter: Meter) -> Addition:
    if name == CYCLES:
        from pytest_cka_memory.measure.cycles import Cycles

        return Cycles(peaks, meter)
    if name == PROCESS:
        from pytest_cka_memory.measure.process import ProcessMemory

        return ProcessMemory(peaks, meter)
    if name == TIMELINE:
        from pytest_cka_memory.measure.timeline import Timeline

        return Timeline(peaks, meter)
    assert name == DRIVER, "the names were checked"
    from pytest_cka_memory.measure.driver import DriverMemory

    return DriverMemory(peaks, meter)
