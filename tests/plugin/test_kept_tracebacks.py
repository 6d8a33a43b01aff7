"""A plugin that keeps the tracebacks of failed tests does not keep their memory."""

import gc
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch

from pytest_cka_memory.plugin import kept_tracebacks

pytest.importorskip("pytest_rerunfailures")

SOURCE = """
import weakref
import pytest
import torch

SEEN = []

def use(device):
    values = torch.empty(2**25, device=device)  # 128 MB: garbage of a few MB may stay for a while
    SEEN.append(weakref.ref(values))
    raise {error}

def no_value_is_alive():
    return not any(seen() is not None for seen in SEEN)

{mark}
def test_fails(cka_memory):
    if no_value_is_alive():
        use(cka_memory.device)

def test_after(cka_memory):
    assert len(SEEN) == {runs} and no_value_is_alive()
"""


@pytest.mark.parametrize(
    ("mark", "runs"), [("", 1), ("@pytest.mark.flaky(reruns=2)", 3)], ids=["one-run", "reruns"]
)
@pytest.mark.parametrize(
    "error", ["RuntimeError('out of memory')", "pytest.fail.Exception('given up')"]
)
def test_memory_of_a_failed_run_is_freed_before_the_next(session, error, mark, runs):
    """pytest-rerunfailures keeps exceptions; the memory of a
    failed run is freed before the next.
    """
    source = SOURCE.format(error=error, mark=mark, runs=runs)
    run = session(source, forked=True)  # pytester keeps the exceptions of its own process
    found = run.result.parseoutcomes()
    assert (found["passed"], found["failed"], found.get("rerun", 0)) == (1, 1, runs - 1), run.text


@pytest.mark.slow
@pytest.mark.emulates
def test_card_is_not_full_after_an_out_of_memory_error(session):
    """After an out-of-memory error the card is free again; else each later test would fail too."""
    run = session(
        """
        import torch

        def test_too_much(cka_memory):
            kept = [torch.empty(2**31, dtype=torch.uint8, device=cka_memory.device)]
            while True:
                kept.append(torch.empty_like(kept[0]))

        def test_after(cka_memory):
            assert cka_memory.snapshot().allocated_bytes == 0
            torch.empty(2**33, dtype=torch.uint8, device=cka_memory.device)

        class TestClass:
            def test_fills_an_attribute(self, cka_memory):
                self.kept = []
                while True:
                    values = torch.empty(2**31, dtype=torch.uint8, device=cka_memory.device)
                    self.kept.append(values)

            def test_after(self, cka_memory):
                assert cka_memory.snapshot().allocated_bytes == 0

        def test_hook_keeps_outputs(cka_memory):
            model = torch.nn.Linear(8, 8).to(cka_memory.device)
            model.cache = []
            model.register_forward_hook(lambda module, args, out: module.cache.append(out))
            while True:
                model(torch.empty(2**25, 8, device=cka_memory.device))

        def test_after_the_hook(cka_memory):
            assert cka_memory.snapshot().allocated_bytes == 0
        """,
        "--cka-memory-device=emulate:cuda:t4,values=off",
        forked=True,
    )
    run.assert_outcomes(passed=3, failed=3)
    assert "CUDA out of memory" in run.text


HANDLED_BY_A_PLUGIN = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except RuntimeError as error:
        pyfuncitem.of_a_plugin = error
        return True
"""


def test_memory_of_an_exception_that_a_plugin_handles_is_freed(session, pytester):
    """A plugin may handle an exception and keep it, so that the test passes and no report has it:
    what its traceback keeps is freed as well.
    """
    pytester.makeconftest(HANDLED_BY_A_PLUGIN)
    run = session(
        """
        import weakref
        import torch

        SEEN = []

        def test_raises():
            values = torch.empty(2**25)
            SEEN.append(weakref.ref(values))
            raise RuntimeError("handled")

        def test_after():
            assert len(SEEN) == 1 and SEEN[0]() is None
        """,
        "--cka-memory-report",
        forked=True,
    )
    run.assert_outcomes(passed=2)


def error_that_keeps(values):
    """Return an exception whose traceback refers to `values`."""
    try:
        kept = values  # noqa: F841
        raise ValueError("message")
    except ValueError as error:
        return error


def values_kept_by(error):
    return innermost_frame(error).f_locals.get("values")


def innermost_frame(error):
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame


@pytest.mark.parametrize(
    "attribute",
    [
        lambda error: error,
        lambda error: {"call": [pytest.ExceptionInfo.from_exception(error)]},
        lambda error: pytest.CallInfo.from_call(lambda: raise_again(error), "call"),
        lambda error: caused_by(error),
    ],
    ids=["exception", "list-in-dict", "call", "cause"],
)
def test_values_are_released_wherever_the_exception_is(attribute):
    """Values of a stored exception are released, but its message and lines of code stay."""
    error = error_that_keeps([1])
    config = SimpleNamespace(stash=pytest.Stash())
    item, following = (
        SimpleNamespace(config=config, stash=pytest.Stash(), funcargs={}) for _ in range(2)
    )
    item.of_a_plugin = attribute(error)
    kept_tracebacks.note_raised(item)
    assert not kept_tracebacks.release_at_setup(item)
    assert values_kept_by(error) == [1]
    assert kept_tracebacks.release_at_setup(following)
    assert values_kept_by(error) is None
    assert str(error) == "message"
    assert innermost_frame(error).f_code is error_that_keeps.__code__
    assert not kept_tracebacks.release_at_setup(
        SimpleNamespace(config=config, stash=pytest.Stash())
    )


@pytest.mark.parametrize("failed", [True, False])
def test_object_of_a_failed_test_is_dropped_when_another_test_begins(failed):
    """Pytest keeps the object of a failed test; it is dropped when another test begins.

    It is not dropped before a rerun, which may need it.
    """
    config = SimpleNamespace(stash=pytest.Stash())
    item, following = (
        SimpleNamespace(config=config, stash=pytest.Stash(), _instance=[number])
        for number in range(2)
    )
    kept_tracebacks.release_at_setup(item)
    if failed:
        kept_tracebacks.note_failure(item)
    kept_tracebacks.release_at_setup(item)
    assert item._instance == [0]
    assert kept_tracebacks.release_at_setup(following) is failed
    assert hasattr(item, "_instance") is not failed
    assert following._instance == [1]


def test_values_of_fixtures_are_left_alone():
    """An exception that a fixture returns belongs to the user, so its values are left alone."""
    error = error_that_keeps([1])
    config = SimpleNamespace(stash=pytest.Stash())
    kept_tracebacks.release_at_setup(
        SimpleNamespace(config=config, stash=pytest.Stash(), funcargs={"error": error})
    )
    assert not kept_tracebacks.release_at_setup(
        SimpleNamespace(config=config, stash=pytest.Stash())
    )
    assert values_kept_by(error) == [1]


def keep_in_a_hook(values):
    """Return the exception of a module's hook; torch keeps the arguments in a closure."""
    module = torch.nn.Identity()

    def fail(module, args, output):
        raise ValueError("message")

    module.register_forward_hook(fail)
    try:
        module(values)
    except ValueError as error:
        return error


def test_values_in_a_closure_that_only_a_frame_keeps_are_released():
    """``frame.clear()`` leaves a function's closure as it is, so its values are released
    separately.
    """
    values = torch.ones(5)
    reference = weakref.ref(values)
    error = keep_in_a_hook(values)
    del values
    assert reference() is not None
    kept_tracebacks._clear_variables(error)
    gc.collect()
    assert reference() is None


def test_values_in_a_closure_that_is_still_in_use_are_left_alone():
    """If another function shares a closure, or the function can still be called, it is kept."""
    kept = [1]

    def fail():
        raise ValueError(kept)

    def count():
        return len(kept)

    try:
        fail()
    except ValueError as error:
        caught = error
    kept_tracebacks._clear_variables(caught)
    assert count() == 1
    with pytest.raises(ValueError, match=r"\[1\]"):
        fail()


def raise_again(error):
    raise error


def caused_by(error):
    try:
        raise RuntimeError("because of it") from error
    except RuntimeError as wrapper:
        return wrapper
