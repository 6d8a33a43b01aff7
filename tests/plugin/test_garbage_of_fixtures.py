"""Garbage that fixtures of several tests leave is collected before the next region."""

import pytest

pytestmark = pytest.mark.native

GARBAGE = """
import gc, unittest
import pytest, torch

class Node: pass

def node_in_a_cycle():
    node = Node()
    node.me, node.tensor = node, torch.ones(2**18)
    return node

def test_later(cka_memory):
    with cka_memory.measure() as region:
        gc.collect()
        tensor = torch.ones(2**17)
        del tensor
    assert region.peak_increase_bytes == 2**19
    assert region.net_bytes == 0
"""
MODULE = """
from test_b import *
del test_later

@pytest.fixture(scope="module")
def model():
    yield node_in_a_cycle()

def test_earlier(model, cka_memory):
    with cka_memory.measure(): pass
"""
CLASS = """
from test_b import *
del test_later

class TestEarlier(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.model = node_in_a_cycle()
    @classmethod
    def tearDownClass(cls): del cls.model
    def test_it(self): pass
"""


@pytest.mark.parametrize("earlier", [MODULE, CLASS], ids=["module-fixture", "class-set-up"])
def test_model_that_a_fixture_has_dropped_is_not_part_of_the_next_region(
    session, pytester, earlier
):
    """A model that a fixture has dropped is collected before the next region, whose peak it would
    hide.
    """
    pytester.makepyfile(test_a=earlier, test_b=GARBAGE)
    run = session(None, "--cka-memory-report", "--cka-memory-device=cpu")
    run.result.assert_outcomes(passed=2)


def test_classes_without_tensors_need_no_full_collection(session, pytester):
    """Pytest gives every TestCase a set-up, which alone needs no full collection of garbage."""
    pytester.makeconftest(
        """
import gc

COUNTED = []

def count(phase, info):
    if phase == "stop" and info["generation"] == 2:
        COUNTED.append(info)

def pytest_collection_finish(session):
    gc.disable()
    gc.collect()
    gc.callbacks.append(count)

def pytest_sessionfinish(session):
    gc.callbacks.remove(count)
    gc.enable()
    print("full collections:", len(COUNTED))
"""
    )
    source = "import unittest, torch\nKEPT = []\n" + "".join(
        f"class Test{n}(unittest.TestCase):\n    def test_it(self): {test}\n"
        for n, test in enumerate(["KEPT.append(torch.ones(3))"] + 8 * ["torch.ones(3).sum()"])
    )
    run = session(source, "--cka-memory-report", "--cka-memory-device=cpu", "-s")
    run.result.assert_outcomes(passed=9)
    # One for what was alive before the first region, two for what the first test has kept.
    assert any(f"full collections: {count}\n" in run.text for count in range(4)), run.text
