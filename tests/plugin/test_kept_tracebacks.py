"""A plugin that keeps the tracebacks of failed tests does not keep their memory."""

import traceback
from types import SimpleNamespace

import pytest

from pytest_cka_memory.plugin import kept_tracebacks

pytest.importorskip("pytest_rerunfailures")

SOURCE = """
import weakref
import pytest
import torch

SEEN = []

def use():
    values = torch.ones(2**18)
    SEEN.append(weakref.ref(values))
    raise {error}

def no_value_is_alive():
    return not any(seen() is not None for seen in SEEN)

{mark}
def test_fails(cka_memory):
    if no_value_is_alive():
        use()

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
    """pytest-rerunfailures keeps the exception of a test that it does not run again, too."""
    source = SOURCE.format(error=error, mark=mark, runs=runs)
    run = session(source, subprocess=True)  # pytester keeps the exceptions of its own process
    found = run.result.parseoutcomes()
    assert (found["passed"], found["failed"], found.get("rerun", 0)) == (1, 1, runs - 1), run.text


@pytest.mark.predicts
def test_predicted_card_is_not_full_after_an_out_of_memory_error(session):
    """Otherwise every later test would run out of memory too, and nothing would say why."""
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
        """,
        "--cka-memory-device=predict:cuda:t4",
        subprocess=True,
    )
    run.assert_outcomes(passed=1, failed=1)
    assert "Predicted: CUDA out of memory" in run.text


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
    """The message and the lines of the traceback stay."""
    error = error_that_keeps([1])
    config = SimpleNamespace(stash=pytest.Stash())
    item, following = (SimpleNamespace(config=config, funcargs={}) for _ in range(2))
    item.of_a_plugin = attribute(error)
    assert not kept_tracebacks.release_at_setup(item)
    assert values_kept_by(error) == [1]
    assert kept_tracebacks.release_at_setup(following)
    assert values_kept_by(error) is None
    assert str(error) == "message"
    assert innermost_frame(error).f_code is error_that_keeps.__code__
    assert not kept_tracebacks.release_at_setup(SimpleNamespace(config=config))


def test_values_of_fixtures_are_left_alone():
    """An exception that a fixture returns belongs to the user."""
    error = error_that_keeps([1])
    config = SimpleNamespace(stash=pytest.Stash())
    kept_tracebacks.release_at_setup(SimpleNamespace(config=config, funcargs={"error": error}))
    assert not kept_tracebacks.release_at_setup(SimpleNamespace(config=config))
    assert values_kept_by(error) == [1]


def raise_again(error):
    raise error


def caused_by(error):
    try:
        raise RuntimeError("because of it") from error
    except RuntimeError as wrapper:
        return wrapper
