"""The hooks that measure: loaded when a test asks for it, or an option does."""

from collections.abc import Generator
from typing import Any

import pytest

from pytest_cka_memory.integrations import torchrun, xdist
from pytest_cka_memory.meters import Meter, meter_for
from pytest_cka_memory.plugin import items


@pytest.hookimpl(trylast=True)
def pytest_cka_memory_meter(device: str) -> Meter:
    rank = torchrun.this_rank()
    return meter_for(device, preferred=rank.local if rank else None)


def pytest_sessionstart(session: pytest.Session) -> None:
    chosen = session.config.stash[items.settings_key]
    if chosen.names_accelerator and xdist.is_controller(session.config):
        xdist.check_device(session.config, chosen.device)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if config.option.collectonly:
        return
    if xdist.is_worker(config):  # it cannot refuse to start: its tests will say what is wrong
        if any(map(items.is_measured, session.items)):
            xdist.take_gpu(config)
        return
    items.check(session.items)
    if config.stash[items.settings_key].names_accelerator:
        items.meter_of(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    items.begin(item)


# After the skips, which are tryfirst, so that a skipped test imports no torch.
@pytest.hookimpl(specname="pytest_runtest_setup")
def pytest_runtest_setup_after_skips(item: pytest.Item) -> None:
    items.need_meter(item)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    job = items.measurement_of(item)
    if job is None:
        return (yield)
    if items.is_sync_testcase(item):
        with items.measured_method(item, job):
            return (yield)
    result = yield
    items.refuse_unseen(item, job)
    return result


# Innermost: fixture values are then in both readings and cancel, and what an earlier failure
# kept in sys.last_traceback is already gone, so it cannot mask a leak.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    job = items.measurement_of(pyfuncitem)
    with items.unmeasured_call(pyfuncitem) if job is None else job.measured_call():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    job = item.stash.get(items.measurement_key, None)
    if job is not None and call.when != "setup":
        # A plain attribute of builtin types: it reaches the controller with the report itself,
        # and so survives a worker that dies later.
        report.cka_memory = job.take_payload(report)  # type: ignore[attr-defined]
    return report


def late_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """As :func:`pytest_runtest_call`, of a test that was marked after its set-up had begun."""
    items.begin(item)
    items.need_meter(item)
    return (yield from pytest_runtest_call(item))
