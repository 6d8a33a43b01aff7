"""What is made once, when a feature is first used inside a region, is not the user's.

Torch keeps one thing of these itself, also on a card: the workspaces of cuBLAS on the device, which
are one-time bytes (`test_workspaces.py`). On the host it keeps nothing.
"""

import pytest

LEAST_FEATURES = 30
CUBLAS, LT = 8_519_680, 2**20
"""Bytes of a workspace on an A100, and of cuBLASLt's, which some versions of torch keep apart
(`test_workspaces.py`); a backward thread has its own."""
WORKSPACES = {0, CUBLAS, CUBLAS + LT, 2 * CUBLAS, 2 * CUBLAS + LT}


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.parametrize("values", ["on", "off"])
def test_first_use_of_a_feature_retains_nothing(python, values):
    """Nothing on the host and nothing on the device, apart from workspaces."""
    run = python("tests/emulated/first_uses.py", values)  # others have imported much
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) >= LEAST_FEATURES, run.stderr
    for name, *figures in lines:
        assert figures[:2] == ["0", "0"], (name, figures)
        assert int(figures[2]) in WORKSPACES, (name, figures)
