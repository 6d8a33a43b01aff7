"""A pytest plugin that runs a sample of the tests: ``-p sampling``.

``FOREIGN_SAMPLE`` in the environment is how many tests run, ``FOREIGN_WORDS`` has words, of
which a test's name must have one, and ``FOREIGN_SEED`` draws another sample.
The sample is drawn by the names of the tests, so it is the same in each process.
"""

import os
import random

import pytest

SEED = 55


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the tests of the sample, in their order."""
    words = os.environ.get("FOREIGN_WORDS", "").split()
    names = sorted(
        item.nodeid
        for item in items
        if not words or any(word in item.nodeid.lower() for word in words)
    )
    count = min(len(names), int(os.environ.get("FOREIGN_SAMPLE", len(names))))
    seed = int(os.environ.get("FOREIGN_SEED", SEED))
    drawn = {*random.Random(seed).sample(names, count)}
    items[:] = [item for item in items if item.nodeid in drawn]
