"""Each allocation and release of a region, as the data of a picture (``--cka-memory-timeline``)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pytest_cka_memory.core.allocations import AllocationSite
from pytest_cka_memory.core.memory_timeline import Place, Recording, picture_of
from pytest_cka_memory.holders import tensors
from pytest_cka_memory.measure.additions import Addition
from pytest_cka_memory.meters.base import Meter, Peaks


class Timeline(Addition):
    """Records while the region runs, and reduces what was recorded at its end."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks = peaks
        peaks.record()

    def fields(self) -> dict[str, Any]:
        recording = self._peaks.recorded()
        if recording is None:
            return {"memory_timeline": {"memories": []}}  # the page says that it was asked for
        return {"memory_timeline": picture_of(recording, partial(_places, recording))}


def _places(recording: Recording, keys: Sequence[tuple[int, int]]) -> list[Place]:
    sites: dict[int, AllocationSite | None] = {}
    for stack, _ in keys:
        if stack not in sites:
            recorded = recording.site_of(stack)
            sites[stack] = None if recorded is None else recorded.readable()
    modules = {site.module for site in sites.values() if site and site.module}
    paths = {module: recording.module_path(module) for module in modules}
    # A stack that was known before the recording has no path; its module may be live.
    paths |= tensors.module_paths({module for module, path in paths.items() if not path})
    return [_place(sites[stack], paths, recording.insides[inside]) for stack, inside in keys]


def _place(site: AllocationSite | None, paths: Mapping[int, str], inside: str | None) -> Place:
    if site is None:
        return Place("", "", "", inside or "", ())
    line, *callers = site.frames or ("",)
    module = paths.get(site.module, "")
    return Place(line, site.code or "", module, inside or "", tuple(callers))
