"""The hooks that measure; registered once a test or an option asks for it."""

from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.markers import SESSION_FIXTURE
from pytest_cka_memory.integrations import (
    check_device,
    is_controller,
    is_worker,
    take_gpu,
    this_rank,
)
from pytest_cka_memory.plugin import given_by, kept_tracebacks, shared_regions
from pytest_cka_memory.plugin.device import fail_without_meter, known_meter, meter_of
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
    from pytest_cka_memory.plugin.judging import ItemJudge


class Hooks:
    """The hooks of one session; registered under a name, because :mod:`.activation` asks for it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._measurement: ModuleType | None = None
        self._meter: Meter | None = None
        """That of the session, from when it is known."""
        self._called: tuple[pytest.Item, ItemJudge | None] | None = None
        """The test that is being called, and what judges it if it is measured."""
        self._regions: shared_regions.FixtureRegions | None = None
        self._serials: dict[pytest.FixtureDef[Any], int | None] = {}
        """The number of allocations before each class and module was set up; None if nothing was
        done."""
        self._start_serial = 0
        """The number of allocations before the set-up of the last test."""

    def _measuring(self) -> ModuleType:
        """Return what measures tests; imported with the first, because a controller measures none.

        It is the same module for a whole session, also if a test removes modules from
        ``sys.modules``.
        """
        if self._measurement is None:
            with plain_imports():
                from pytest_cka_memory.plugin import measurement
            self._measurement = measurement
            self._regions = shared_regions.regions_of(self._config)
        return self._measurement

    def _known_meter(self) -> "Meter | None":
        if self._meter is None:
            self._meter = known_meter(self._config)
        return self._meter

    @pytest.hookimpl(trylast=True)
    def pytest_cka_memory_meter(self, device: str) -> "Meter":
        rank = this_rank()
        with plain_imports():  # some meters are imported when they are asked for
            from pytest_cka_memory.meters.selection import meter_for

            return meter_for(device, preferred=rank.local if rank else None)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        settings = session.config.stash[settings_key]
        if settings.names_accelerator and is_controller(session.config):
            from pytest_cka_memory.meters import is_emulated

            if is_emulated(settings.device):
                return  # loaded already, or refused
            check_device(session.config, settings.device, given_by(session.config, "device"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        config = session.config
        if config.option.collectonly:
            return
        # It cannot refuse to start: its tests report what is wrong.
        if is_worker(config):
            # An emulated device belongs to its worker alone, and "cuda:1" counts all visible GPUs.
            can_choose = config.stash[settings_key].can_choose_gpu
            if can_choose and any(map(_may_use_device, session.items)):
                take_gpu(config)
            return
        check(session.items)
        if config.stash[settings_key].names_accelerator:
            meter_of(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        released = kept_tracebacks.release_at_setup(item)
        meter = self._meter or self._known_meter()
        if meter is not None:
            if released:
                meter.between_regions(objects_dropped=True, since=self._start_serial)
            meter.between_regions()
            self._start_serial = meter.serial()
        (self._measurement or self._measuring()).begin(item)
        if self._regions is not None:
            self._regions.is_running = True

    # After implementations that skip tests, which are tryfirst: a skipped test imports no torch.
    @pytest.hookimpl(specname="pytest_runtest_setup")
    def pytest_runtest_setup_after_skips(self, item: pytest.Item) -> None:
        plan = plan_of(item)
        if plan.is_measured and self._meter is None and self._known_meter() is None:
            fail_without_meter(item)
        if plan.scoped_limits:
            shared_regions.begin_scopes(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> None:
        if not is_set_up(fixturedef):  # other fixtures may drop anything
            return
        meter = self._known_meter()
        does_nothing = is_set_up_of_testcase(fixturedef) and not has_class_fixture(request.cls)
        if does_nothing or meter is not None:
            serial = None if meter is None or does_nothing else meter.serial()
            self._serials[fixturedef] = serial

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        # What a fixture of one test made shows in the level, but a module's model was part of it.
        if fixturedef.scope == "function":
            return
        meter = self._known_meter()
        if meter is not None:
            since = self._serials.pop(fixturedef, 0)
            if since is not None:
                meter.between_regions(objects_dropped=True, since=since)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        measuring = self._measurement or self._measuring()
        assert self._regions is not None, "known with what measures"
        self._regions.is_called = True
        try:
            judge = measuring.judge_of(item)
            self._called = item, judge
            if judge is not None and measuring.is_testcase(item):
                return (yield from measuring.measured_method(item, judge))
            result = yield  # what measures a function is closer to its code
            if judge is not None:
                judge.refuse_unseen()
            return result
        finally:
            self._regions.is_called = False
            self._called = None

    # The innermost wrapper: fixture values are then in both readings and cancel, and pytest has
    # dropped sys.last_traceback, so what an earlier failure kept alive cannot mask a leak.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        measuring = self._measurement or self._measuring()
        try:
            item, judge = self._called or (None, None)
            if judge is None or item is not pyfuncitem:
                judge = measuring.judge_of(pyfuncitem)
            if judge is None:
                result = yield
                measuring.end_unmeasured(pyfuncitem)
                return result
            if judge.runs > 1:
                return (yield from measuring.repeated_function(pyfuncitem, judge))
            return (yield from measuring.measured_call(pyfuncitem, judge))
        except BaseException:  # another plugin may handle it, so that no report has it
            kept_tracebacks.note_raised(pyfuncitem)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        when, error = call.when, None if call.excinfo is None else call.excinfo.value
        failed = report.outcome == "failed"
        if error is not None:
            kept_tracebacks.note_raised(item)
            show_headline(error, report)
            if when == "call":
                kept_tracebacks.note_exception(item, error)
        if failed:
            shared_regions.note_failure_in_scopes(item)
            if when == "call":
                kept_tracebacks.note_failure(item)
        if when == "setup":
            judge = None
        else:
            measuring = self._measurement or self._measuring()
            judge = item.stash.get(measuring.judge_key, None)
        if judge is not None:
            if when == "call":
                if not failed and judge.files is not None:  # also a test that is expected to fail
                    judge.files.remove()
                if report.longrepr is not None:
                    judge.add_explanations(report)
                    _name_repairs(item, error, report)
            # A plain attribute of builtin types: it reaches the controller together with the
            # report, and so it survives a worker that dies later.
            report.cka_memory = judge.take_payload(report)  # type: ignore[attr-defined]
            if when == "teardown":
                measuring.forget(item)
        if self._regions is not None:
            self._regions.add_to(report, item)
        return report

    def late_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Call :meth:`pytest_runtest_call` for a test that got its marker during its setup."""
        self._measuring().begin(item)
        if plan_of(item).is_measured:
            fail_without_meter(item)
        return (yield from self.pytest_runtest_call(item))


def _may_use_device(item: pytest.Item) -> bool:
    """Whether the test, or a fixture of it, is measured."""
    return plan_of(item).is_measured or SESSION_FIXTURE in getattr(item, "fixturenames", ())


def _name_repairs(
    item: pytest.Item, error: BaseException | None, report: pytest.TestReport
) -> None:
    """Name the command that tries to make a test fit, if it ran out of the device's memory."""
    if type(error).__name__ != "OutOfMemoryError":
        return
    meter = known_meter(item.config)
    add_section = getattr(report.longrepr, "addsection", None)
    if meter is not None and add_section is not None:
        from pytest_cka_memory.reports import excess

        lines = excess.repair_of_out_of_memory(item.nodeid, meter.facts())
        add_section("cka-memory: repair", "\n".join(lines))
