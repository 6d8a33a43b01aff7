"""The hooks that measure; registered once a test or an option asks for it."""

from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.markers import SESSION_FIXTURE
from pytest_cka_memory.integrations import process_roles
from pytest_cka_memory.integrations.process_roles import this_rank
from pytest_cka_memory.plugin import kept_tracebacks, shared_regions
from pytest_cka_memory.plugin.device import fail_without_meter, known_meter, meter_of
from pytest_cka_memory.plugin.options import given_by
from pytest_cka_memory.plugin.plan import check, plan_of
from pytest_cka_memory.plugin.pytest_private import (
    has_class_fixture,
    is_set_up,
    is_set_up_of_testcase,
    plain_imports,
    show_headline,
)
from pytest_cka_memory.plugin.settings import settings_key

if TYPE_CHECKING:
    from pytest_cka_memory.meters.base import Meter

_measuring_key = pytest.StashKey[ModuleType]()


def _measuring(config: pytest.Config) -> ModuleType:
    """Return what measures tests; imported with the first, because a controller measures none.

    It is the same module for a whole session, also if a test removes modules from ``sys.modules``.
    """
    if _measuring_key not in config.stash:
        with plain_imports():
            from pytest_cka_memory.plugin import measurement
        config.stash[_measuring_key] = measurement
    return config.stash[_measuring_key]


_serials_key = pytest.StashKey[dict[pytest.FixtureDef[Any], int | None]]()
"""The number of allocations before each class and module was set up; None if nothing was done."""
_start_key = pytest.StashKey[int]()
"""The number of allocations before the set-up of the last test."""


@pytest.hookimpl(trylast=True)
def pytest_cka_memory_meter(device: str) -> "Meter":
    rank = this_rank()
    with plain_imports():  # some meters are imported when they are asked for
        from pytest_cka_memory.meters.selection import meter_for

        return meter_for(device, preferred=rank.local if rank else None)


def pytest_sessionstart(session: pytest.Session) -> None:
    settings = session.config.stash[settings_key]
    if settings.names_accelerator and process_roles.is_controller(session.config):
        from pytest_cka_memory.meters.device_names import is_emulated

        if is_emulated(settings.device):
            return  # loaded already, or refused
        process_roles.check_device(
            session.config, settings.device, given_by(session.config, "device")
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if config.option.collectonly:
        return
    if process_roles.is_worker(config):  # it cannot refuse to start: its tests report what is wrong
        # An emulated device belongs to its worker alone, and "cuda:1" counts all visible GPUs.
        can_choose = config.stash[settings_key].can_choose_gpu
        if can_choose and any(map(_may_use_device, session.items)):
            process_roles.take_gpu(config)
        return
    check(session.items)
    if config.stash[settings_key].names_accelerator:
        meter_of(config)


def _may_use_device(item: pytest.Item) -> bool:
    """Whether the test, or a fixture of it, is measured."""
    return plan_of(item).is_measured or SESSION_FIXTURE in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    released = kept_tracebacks.release_at_setup(item)
    meter = known_meter(item.config)
    if meter is not None:
        stash = item.config.stash
        if released:
            meter.between_regions(objects_dropped=True, since=stash.get(_start_key, 0))
        meter.between_regions()
        stash[_start_key] = meter.serial()
    _measuring(item.config).begin(item)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    if not is_set_up(fixturedef):  # other fixtures may drop anything
        return
    meter = known_meter(request.config)
    does_nothing = is_set_up_of_testcase(fixturedef) and not has_class_fixture(request.cls)
    if does_nothing or meter is not None:
        serial = None if meter is None or does_nothing else meter.serial()
        request.config.stash.setdefault(_serials_key, {})[fixturedef] = serial


def pytest_fixture_post_finalizer(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    meter = known_meter(request.config)
    # What a fixture of one test made shows in the level, but a module's model was part of it.
    if meter is not None and fixturedef.scope != "function":
        since = request.config.stash.setdefault(_serials_key, {}).pop(fixturedef, 0)
        if since is not None:
            meter.between_regions(objects_dropped=True, since=since)


# After the implementations that skip tests, which are tryfirst: a skipped test imports no torch.
@pytest.hookimpl(specname="pytest_runtest_setup")
def pytest_runtest_setup_after_skips(item: pytest.Item) -> None:
    plan = plan_of(item)
    if plan.is_measured:
        fail_without_meter(item)
    if plan.scoped_limits:
        shared_regions.begin_scopes(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    try:
        result = yield
    except BaseException:
        shared_regions.note_failure_in_scopes(item)
        raise
    finally:
        shared_regions.end_scopes(item, nextitem)
    return result


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    measuring = _measuring(item.config)
    plan = plan_of(item)
    judge = measuring.judge_of(item, plan)
    with measuring.around_call(item, judge):
        return (yield)


# The innermost wrapper: fixture values are then in both readings and cancel, and pytest has dropped
# sys.last_traceback, so what an earlier failure kept alive cannot mask a leak.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    measuring = _measuring(pyfuncitem.config)
    plan = plan_of(pyfuncitem)
    judge = measuring.judge_of(pyfuncitem, plan)
    with measuring.around_function(pyfuncitem, judge):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    show_headline(call, report)
    if call.when == "call" and call.excinfo is not None:
        kept_tracebacks.note_exception(item, call.excinfo.value)
    if call.when == "call" and report.failed:
        kept_tracebacks.note_failure(item)
    if report.failed:
        shared_regions.note_failure_in_scopes(item)
    judge = item.stash.get(_measuring(item.config).judge_key, None)
    if judge is not None and call.when == "call":
        if not report.failed:  # also a test that is expected to fail
            judge.files.remove()
        judge.add_explanations(report)
        _name_repairs(item, call, report)
    if judge is not None and call.when != "setup":
        # A plain attribute of builtin types: it reaches the controller together with the report,
        # and so it survives a worker that dies later.
        report.cka_memory = judge.take_payload(report)  # type: ignore[attr-defined]
        if call.when == "teardown":
            _measuring(item.config).forget(item)
    return report


def _name_repairs(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Name the command that tries to make a test fit, if it ran out of the device's memory."""
    meter = known_meter(item.config)
    add_section = getattr(report.longrepr, "addsection", None)
    if call.excinfo is None or meter is None or add_section is None:
        return
    if type(call.excinfo.value).__name__ == "OutOfMemoryError":
        from pytest_cka_memory.reports import excess

        lines = excess.repair_of_out_of_memory(item.nodeid, meter.facts())
        add_section("cka-memory: repair", "\n".join(lines))


def late_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Call :func:`pytest_runtest_call` for a test that got its marker during its setup."""
    _measuring(item.config).begin(item)
    if plan_of(item).is_measured:
        fail_without_meter(item)
    return (yield from pytest_runtest_call(item))
