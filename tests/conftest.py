"""Fixtures for every test, and skips for tests that this machine or torch version cannot run."""

import functools
import gc
import importlib
import importlib.util
import itertools
import linecache
import os
import pkgutil
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import forked_processes  # here, because pytester removes what is imported during its test
import kept_metadata  # noqa: F401 - each inner session reads the metadata of all packages
import listed_plugins
import pytest

pytest_plugins = ["pytester"]

# Parallel workers share the cores: with one_core thread per core in each, most threads would wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# Inductor compiles the small functions of the tests in the process itself. Otherwise each process
# that compiles one would start a process for each core, which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Processes that tests start read what an earlier one has compiled of this project. Otherwise each
# would compile all of it again, and pytest's rewriting of asserts makes that slow.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests of the plugin together with these load them explicitly with -p.
_OTHER_PLUGINS = ("anyio", "asyncio", "benchmark", "cov", "hypothesispytest", "randomly", "repeat")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that CI uses to run all tests."""
    parser.addoption(
        "--slow",
        action="store_true",
        help="run tests that take a second or more, too; those chosen by a path, -k, -m slow "
        "or --lf run anyway",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let inner sessions in this process search less of each plugin."""
    listed_plugins.list_hooks_and_fixtures(config.pluginmanager)
    config.option.slow |= _asks_for_some(config)


def _asks_for_some(config: pytest.Config) -> bool:
    """Whether tests are chosen for a session, by whatever means: then those are wanted."""
    option = config.option
    by_path = config.args_source is pytest.Config.ArgsSource.ARGS
    of_last_time = getattr(option, "lf", False) or getattr(option, "stepwise", False)
    return bool(by_path or of_last_time or option.keyword or "slow" in option.markexpr)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that slow tests were left out: under pytest-xdist, nothing else does."""
    if not terminalreporter.config.option.slow:
        terminalreporter.write_line(
            "left out: tests that take a second or more; pytest --slow runs them, as CI does"
        )


@pytest.fixture(scope="module")
def imports_excluded_from_collection() -> None:
    """Hide what was imported so far from the garbage collector.

    Every reading collects, and with the modules of torch one collection is slow. Objects that a
    test creates are collected as usual. While objects are frozen, the CPU meter takes tensors that
    it sees for the first time for old ones; tests of the meters use `imports_excluded_from_search`.
    """
    _freeze()


_has_frozen = False
"""Whether `imports_excluded_from_collection` has hidden objects that are hidden still."""
_frozen_modules = 0
"""How many modules were imported when objects were hidden last."""
_MANY_MODULES = 100


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Show everything to the collector again before a test that does not exclude the imports.

    Before another one, hide what a test has imported since, such as the compiler of torch; but not
    from tests of the meters, which know what was hidden when their module began.
    """
    fixtures = getattr(item, "fixturenames", ())
    if "imports_excluded_from_collection" not in fixtures:
        _unfreeze()
    elif "imports_excluded_from_search" in fixtures:
        return
    elif _has_frozen and len(sys.modules) > _frozen_modules + _MANY_MODULES:
        _freeze()


def _freeze() -> None:
    global _has_frozen, _frozen_modules
    gc.collect()  # fast after the first time: what is hidden stays so until a test does not ask
    gc.freeze()
    _has_frozen, _frozen_modules = True, len(sys.modules)


def pytest_sessionfinish() -> None:
    """Show everything again, because some libraries report what is left when the process ends."""
    _unfreeze()


def _unfreeze() -> None:
    global _has_frozen
    if _has_frozen:
        gc.unfreeze()
        _has_frozen = False


_IMPORTED_BY_SESSIONS = ("core", "holders", "limits", "measure", "plugin", "reports", "stored")


@pytest.fixture(scope="session")
def _imported_for_inner_sessions() -> None:
    """Import what inner sessions import, because pytester removes what a session has added.

    Otherwise each inner session in this process would compile these modules again.
    """
    names = ["pytest_cka_memory.testing", "tabulate"]  # the latter by each report with a table
    names += [f"pytest_cka_memory.{package}" for package in _IMPORTED_BY_SESSIONS]
    if "xdist" in sys.modules:
        names += [f"xdist.{name}" for name in ("dsession", "remote", "report", "workermanage")]
    for name in names:
        imported = importlib.import_module(name)
        for module in pkgutil.iter_modules(getattr(imported, "__path__", []), f"{name}."):
            importlib.import_module(module.name)


@pytest.fixture(scope="module")
def imports_excluded_from_search(imports_excluded_from_collection: None) -> Iterator[None]:
    """Hide what was imported so far also from the CPU meter's search for tensors.

    The meter counts as if nothing were frozen. A tensor that a test module has created when it was
    imported must be created again after this, otherwise the meter would take it for a new one.
    """
    frozen = _FrozenByTests()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", frozen)
        patch.setattr(gc, "freeze", frozen.freeze)
        patch.setattr(gc, "unfreeze", frozen.unfreeze)
        yield


class _FrozenByTests:
    """Counts what is frozen beside what this module and `garbage_programs` have frozen.

    Only if a test has frozen something: Python counts the objects one by one, and with the modules
    of torch that takes as long as a small test.
    """

    def __init__(self) -> None:
        self._count, self._freeze, self._unfreeze = gc.get_freeze_count, gc.freeze, gc.unfreeze
        self._excluded: int | None = None
        self.has_imports = True
        """Whether the imports are still frozen."""

    def exclude_all(self) -> None:
        """Count nothing of what is frozen now, which is all that existed."""
        self._excluded, self.has_imports = None, True

    def freeze(self) -> None:
        """Freeze as ``gc.freeze`` does, and count what that adds."""
        if self._excluded is None:
            self._excluded = self._count()
        self._freeze()

    def unfreeze(self) -> None:
        """Show everything to the collector, as ``gc.unfreeze`` does."""
        self._unfreeze()
        self._excluded, self.has_imports = None, False

    def __call__(self) -> int:
        """Return the number of objects."""
        return 0 if self._excluded is None else max(0, self._count() - self._excluded)


@pytest.fixture
def pytester(
    _imported_for_inner_sessions: None,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> pytest.Pytester:
    """Run inner sessions without the other pytest plugins and outside of a GitHub job.

    Their terminal has 100 columns, so that lines do not depend on the terminal of this session.
    """
    # A test may write a module twice within a second, so nothing compiled is kept in its folder.
    pytester.path.joinpath("__pycache__").touch()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in _OTHER_PLUGINS))
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(
            name, raising=False
        )  # inner sessions must not write to the real job's summary
    return pytester


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what this process starts by ``sys.executable``, and what that starts so.

    Each has imported torch already; a new interpreter would take three seconds for that.
    """
    monkeypatch.setattr(sys, "executable", forked_processes.interpreter())
    monkeypatch.setenv(forked_processes.EXECUTABLE, forked_processes.interpreter())


@pytest.fixture
def fail_late() -> Iterator[Callable[[Any], None]]:
    """Return a function that makes a backward pass fail in a thread of the lowest priority.

    That thread still holds the error and its frames when the caller continues.
    """
    torch = pytest.importorskip("torch")
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("this system has no idle scheduling policy (SCHED_IDLE)")
    all_cores, interval = os.sched_getaffinity(0), sys.getswitchinterval()
    one_core = {min(all_cores)}
    threads = []

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Any) -> Any:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            threads.append(threading.get_native_id())
            os.sched_setaffinity(threads[-1], one_core)
            os.sched_setscheduler(threads[-1], os.SCHED_IDLE, os.sched_param(0))
            raise RuntimeError("this pass fails")

    def fail(device: Any) -> None:
        loss = Failing.apply(torch.ones(1000, device=device, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="this pass fails"):
            loss.backward()

    os.sched_setaffinity(0, one_core)
    sys.setswitchinterval(1000)
    yield fail
    sys.setswitchinterval(interval)
    os.sched_setaffinity(0, all_cores)
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(thread, all_cores)


class StopError(BaseException):
    """The exception of a signal handler, such as that of pytest-timeout."""


def _ends_with_block(frame: FrameType) -> bool:
    """Whether the next instruction of `frame` is part of the end of a ``with`` block.

    Python traces the line of the ``with`` again there, before it calls ``__exit__``, but it runs no
    signal handler: an exception of the tracing function would leave a lock held, a signal does not.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if not line.lstrip().startswith("with "):
        return False
    starts = [start for start, _, number in frame.f_code.co_lines() if number == frame.f_lineno]
    return frame.f_lasti > min(starts)


@pytest.fixture
def interrupted() -> Callable[..., bool]:
    """Return a function that runs another with an exception at a line, in place of a signal's.

    It takes the function, and one that is called with the frame before each line that is traced,
    and returns whether to raise the exception there. It returns whether that was raised. Lines of
    the file of the function do not count, nor does the end of a ``with`` block, nor lines of files
    in which a pattern is not found if one is given.
    """

    def run(
        function: Callable[[], object],
        is_interrupted: Callable[[FrameType], bool],
        files: re.Pattern[str] | None = None,
    ) -> bool:
        left_out = {function.__code__.co_filename, __file__}
        was_interrupted = False

        @functools.cache
        def is_traced(file: str) -> bool:
            return file not in left_out and (files is None or files.search(file) is not None)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal was_interrupted
            if not is_traced(frame.f_code.co_filename):
                return None  # its lines are not traced, only what it calls
            if event != "line" or _ends_with_block(frame):
                return trace
            if is_interrupted(frame):
                was_interrupted = True
                raise StopError
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        except StopError:
            pass
        finally:
            sys.settrace(before)
        return was_interrupted

    return run


@pytest.fixture
def at_line() -> Callable[[int], Callable[[FrameType], bool]]:
    """Return a function that makes `interrupted` raise at the line with a number, from 1."""

    def at_line(number: int) -> Callable[[FrameType], bool]:
        lines = itertools.count(1)
        return lambda frame: next(lines) == number

    return at_line


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip if no CUDA device can be emulated here; fail if only the compiled library is missing.

    It may be missing in what is installed from a wheel: the pure one has no libraries. Each test
    with the marker ``emulates`` uses this.
    """
    import emulated_cuda
    from emulated_cuda.errors import DeviceError
    from emulated_cuda.loading.library import check_available

    try:
        check_available()
    except DeviceError as error:
        wrong = str(error)
    else:
        return
    # Outside the except block, otherwise pytest would print both errors.
    from_sources = Path(emulated_cuda.__file__).is_relative_to(Path(__file__).parents[1])
    if "compiled when" in wrong and from_sources and shutil.which("g++") is not None:
        pytest.fail(f"g++ is installed, so the library must be compiled: {wrong}", pytrace=False)
    pytest.skip(wrong)


def _has_sources() -> bool:
    return (Path(__file__).parents[1] / "setup.py").is_file()


def _counts_natively() -> bool:
    """Whether the counter was compiled: one that cannot be loaded is a fault of it."""
    return importlib.util.find_spec("pytest_cka_memory.meters.blocks._counter") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests; skip those that this machine or torch version cannot run."""
    if not config.option.slow:
        slow = [item for item in items if item.get_closest_marker("slow") is not None]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    for item in items:
        if item.get_closest_marker("emulates") is not None and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "emulation")
    for marker, is_supported, reason in (
        ("gpu", _has_accelerator, "requires an accelerator; torch found none"),
        ("native", _counts_natively, "requires the native counter; it was not compiled here"),
        ("sources", _has_sources, "requires the sources; only the tests are here"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker) is not None]
        if marked and not is_supported():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
