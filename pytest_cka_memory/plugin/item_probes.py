"""Decide what the regions of one test measure and explain, and write files of its allocations.

With ``--cka-memory-snapshots`` the allocator's history is recorded while a test runs, and written
if it fails. Without, a file is written at each refused allocation, while the tensors are live; it
stays only if the refusal has ended the test, because a program that handles the error, such as a
search for the largest batch, needs none. Each test has one file at most.
"""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from pytest_cka_memory.core.figure_rows import TIMELINE
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.retention import GROWTH_ON_HOST
from pytest_cka_memory.core.verdicts import Limit, judge
from pytest_cka_memory.integrations import this_rank
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.meters.base import Meter, RefusalFile
from pytest_cka_memory.plugin import kept_tracebacks
from pytest_cka_memory.plugin.device import meter_of
from pytest_cka_memory.plugin.plan import compared_key, plan_of
from pytest_cka_memory.plugin.pytest_private import without_capture
from pytest_cka_memory.plugin.settings import Settings, settings_key


class ItemExplainer:
    """Decides which figures of a test's regions are explained, before their tensors are freed."""

    def __init__(self, item: pytest.Item, settings: Settings, limits: Sequence[Limit] = ()) -> None:
        self.limits = limits
        """As of the start of the call; batch boundaries use these."""
        self._item, self._settings = item, settings

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        """Return the figures to explain: those too high and, on request, what is retained."""
        return self._figures(record, self.limits, explains_all=self._settings.explain)

    def _figures(
        self, record: RegionRecord, judged_by: Sequence[Limit], *, explains_all: bool
    ) -> Collection[str]:
        figures = {"retained_bytes", "peak_bytes"} if explains_all else set()
        if judged_by:
            figures |= _figures_too_high(self._item.nodeid, record, judged_by)
        if self.limits and any(limit.reports_host for limit in self.limits):
            figures.add(GROWTH_ON_HOST)
        return figures

    def named_values(self) -> Mapping[str, Any]:
        """Return the test's fixtures by name, and ``self`` if it is a method."""
        instance = getattr(self._item, "instance", None)
        own = {} if instance is None else {"self": instance}
        return {**own, **getattr(self._item, "funcargs", {})}

    def notify(self, line: str) -> None:
        """Write a line to standard error, which pytest captures otherwise."""
        from pytest_cka_memory.holders.survivors import to_stderr

        with without_capture(self._item.config):
            to_stderr(line)

    @property
    def draws_paths(self) -> bool:
        """Whether the session asks for a picture of the references to what is retained."""
        return self._settings.draws_paths


class WholeTest(ItemExplainer):
    """Explains the figures of a region around a whole test.

    Args:
        item: the test.
        settings: of the session.
        limits: those of the test, as of the start of the call.
        over_runs: those over all runs of it, if there are several.
        records: those of the regions in the test and in its fixtures.
    """

    def __init__(
        self,
        item: pytest.Item,
        settings: Settings,
        limits: Sequence[Limit],
        over_runs: Sequence[Limit],
        records: Sequence[RegionRecord],
    ) -> None:
        super().__init__(item, settings, limits)
        self._over_runs = over_runs
        self._records = records
        self._in_fixtures = len(records)

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        """Return the figures to explain; none of a region that is not reported."""
        # If the test has regions of its own, only growth over its runs is judged.
        if len(self._records) > self._in_fixtures:
            return self._figures(record, self._over_runs, explains_all=False)
        judged_by = [*self.limits, *self._over_runs]
        return self._figures(record, judged_by, explains_all=self._settings.explain)


def runs_of(item: pytest.Item, settings: Settings) -> int:
    """Return how often the code of a test runs: once if it is not a plain function.

    It must be asked before the call, because pytest-asyncio replaces the function of a coroutine.
    """
    if settings.repeat == 1:
        return 1
    function = getattr(item, "obj", None)
    if function is None or inspect.iscoroutinefunction(function):
        return 1
    return settings.repeat


def _figures_too_high(nodeid: str, record: RegionRecord, limits: Sequence[Limit]) -> set[str]:
    """Return the figures of a region that break one of the limits."""
    breaches = judge(nodeid, record, limits).breaches
    return {breach.figure for breach in breaches if breach.measured_bytes is not None}


def probe_for(item: pytest.Item, explainer: ItemExplainer, settings: Settings) -> MemoryProbe:
    """Return a probe for the regions in a test and in its fixtures.

    Args:
        item: the test.
        explainer: decides which figures are explained.
        settings: of the session.
    """
    return MemoryProbe(
        meter=meter_of(item.config),
        explainer=explainer,
        also=lambda: additions_of(item, settings, plan_of(item).limits),
        before_reading=partial(kept_tracebacks.release_in_call, item),
    )


def additions_of(item: pytest.Item, settings: Settings, limits: Sequence[Limit]) -> Collection[str]:
    """Return what the regions of a test measure in addition."""
    added = {limit.addition for limit in limits} - {""} if limits else set()
    added.update(settings.also)
    if settings.timeline is not None and settings.draws(item.nodeid):
        added.add(TIMELINE)
    if compared_key in item.config.stash:
        compared = item.config.stash[compared_key].get(item.nodeid)
        added |= compared.additions if compared is not None else set()
    return added


_LONGEST_NAME = 120
_FOLDER = "cka-memory-snapshots"
"""Of pytest's cache: where files are if there is neither a folder for them nor a report."""
_COMMANDS = "python -m pytest_cka_memory snapshot {0}\npython -m pytest_cka_memory replay {0}"
_OPTION = "--cka-memory-snapshots=FOLDER"
_HOW_TO_RECORD = (
    "to see how much memory each line of code had allocated, and with which settings of the "
    f"allocator the test would have fitted, run pytest with {_OPTION}, then\n"
    + _COMMANDS.format("FILE")
)
_LIVE = (
    "{0}: the memory that was live when an allocation was refused\nearlier events were "
    f"not recorded; to let replay try settings of the allocator, run pytest with {_OPTION}\n"
)
_RECORDED = "{0}: what the program had recorded when it ran out of memory\n"
_NONE = "no memory snapshot: "


def files_of(item: pytest.Item, meter: Meter, settings: Settings) -> "SnapshotFiles | None":
    """Return what may be written of a test while it is measured; None if that is nothing.

    Args:
        item: the test.
        meter: of the session.
        settings: of the session.
    """
    # Not on devices that never refuse memory: each test would wait for the name of a file.
    may_refuse = type(meter).open_refusal_file is not Meter.open_refusal_file
    if settings.snapshots is None and not may_refuse and type(meter).refused is Meter.refused:
        return None
    return SnapshotFiles(item, meter, settings.snapshots, may_refuse=may_refuse)


class SnapshotFiles:
    """What may be written of one test while it is measured: see :func:`files_of`."""

    def __init__(
        self, item: pytest.Item, meter: Meter, folder: Path | None, *, may_refuse: bool
    ) -> None:
        self._meter, self._item = meter, item
        self._folder, self._may_refuse = folder, may_refuse
        self._file: RefusalFile | None = None

    def begin(self) -> None:
        """Record what the session asks for, and write a file when memory is refused."""
        if self._folder is not None:
            self._meter.record_history()
        if self._may_refuse:
            folder, make_folder = _usual_folder(self._item.config)
            if folder is not None:
                path = _path(folder, self._item.nodeid)
                self._file = self._meter.open_refusal_file(path, make_folder)

    def close(self) -> None:
        """End what :meth:`begin` has begun."""
        if self._file is not None:
            self._meter.close_refusal_file(self._file)
        if self._folder is not None:
            self._meter.stop_history()

    def end(self, error: BaseException | None, *, failed: bool) -> str:
        """Keep or remove the test's file, and return text about it; empty if there is none.

        Args:
            error: the exception that has ended the test, if any.
            failed: whether the test has failed, by it or by a limit.
        """
        if failed and self._folder is not None:
            text = write_snapshot(self._folder, self._item.nodeid, self._meter)
            # The program may have ended the recording when it ran out of memory.
            if not (text.startswith(_NONE) and self._file is not None and self._file.is_written):
                return text
        if not (failed and self._meter.refused() is not None and self._ran_out(error)):
            self.remove()
            return ""
        file = self._file
        if file is None or not file.is_written:
            why = f"{_NONE}{file.problem}\n" if file is not None and file.problem else ""
            return why + _HOW_TO_RECORD
        path = _as_typed(file.path, self._item.config.invocation_params.dir)
        text = _RECORDED if file.has_history else _LIVE
        return text.format(path) + _COMMANDS.format(shlex.quote(path))

    def remove(self) -> None:
        """Remove what was written when memory was refused, also by an earlier session."""
        if self._file is not None and self._folder is None:
            self._file.path.unlink(missing_ok=True)

    def _ran_out(self, error: BaseException | None) -> bool:
        from pytest_cka_memory.meters.torch_versions import is_out_of_memory

        device = self._meter.torch_device
        return any(is_out_of_memory(each, device) for each in _with_causes(error))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or that it is a group of."""
    left, seen = [error], set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _usual_folder(config: pytest.Config) -> tuple[Path | None, Callable[[], object]]:
    """Return the folder of the files and a function that makes it; None if there is none to use.

    It is that for snapshots, that of the session's first report, or one in pytest's cache.
    """
    settings = config.stash[settings_key]
    reports = (path.parent for path in settings.files.values())
    folder = settings.snapshots or next(reports, None)
    if folder is not None:
        return folder, partial(folder.mkdir, parents=True, exist_ok=True)
    cache = getattr(config, "cache", None)
    if cache is None:  # pytest runs without its plugin for that
        return None, bool
    # pytest makes it, because it adds the file by which version control ignores it.
    place = os.path.expandvars(os.path.expanduser(str(config.getini("cache_dir"))))
    return config.rootpath / place / "d" / _FOLDER, partial(cache.mkdir, _FOLDER)


def write_snapshot(folder: Path, nodeid: str, meter: Meter) -> str:
    """Write the allocator's history of a test to a file in `folder`; return a line about it.

    It does not raise if the file cannot be written: a full disk must not hide why the test failed.
    """
    path = _path(folder, nodeid)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not meter.dump_history(path):
            return f"{_NONE}{meter.device} records no allocation history"
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"{_NONE}cannot write {path}: {error.strerror or error}"
    commands = _COMMANDS.format(shlex.quote(str(path)))
    return f"{path}: open it in PyTorch's memory viewer, or\n{commands}"


def _path(folder: Path, nodeid: str) -> Path:
    # With a checksum, because two tests may differ only in characters that file names cannot have.
    checksum = crc32(nodeid.encode(errors="backslashreplace"))
    name = f"{re.sub(r'[^-.A-Za-z0-9]+', '_', nodeid)[-_LONGEST_NAME:]}-{checksum:08x}"
    rank = this_rank()
    return folder / (f"{name}-rank{rank.number}.pickle" if rank else f"{name}.pickle")


def _as_typed(path: Path, start: Path) -> str:
    """Return a path as it is typed in the folder in which pytest was started."""
    return os.path.relpath(path, start) if path.is_relative_to(start) else str(path)
