"""What was needed to measure a test is not kept until the session ends."""

SOURCE = """
import gc
import pytest

@pytest.mark.parametrize("number", range(5))
def test_empty(number): pass

def test_no_earlier_measurement_is_kept():
    gc.collect()
    kinds = [type(it).__name__ for it in gc.get_objects()]
    assert kinds.count("ItemJudge") == 1  # of this test
"""


def test_measurements_of_ended_tests_are_dropped(session):
    """Each full garbage collection would look at what thousands of ended tests have kept."""
    run = session(SOURCE, "--cka-memory-report", forked=True)
    assert run.result.parseoutcomes() == {"passed": 6}, run.text
