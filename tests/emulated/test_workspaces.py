"""The cuBLAS workspaces that torch keeps are one-time bytes, as large as on a real card."""

import pytest

KEPT = """
import torch
from pytest_cka_memory import MemoryProbe

probe = MemoryProbe("emulate:cuda:a100")
square = torch.ones(64, 64, device=probe.device)
layer = torch.nn.Linear(64, 64).to(probe.device)
with probe.measure() as outer:
    with probe.measure() as inner:
        square @ square
        layer(square)
square.requires_grad_()
with probe.measure() as backward:
    (square @ square).sum().backward()
regions = inner, outer, backward
print(*(region.record.one_time_bytes for region in regions), inner.retained_bytes)
"""
CUBLAS, LT = 8_519_680, 2**20


@pytest.mark.emulates
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, (CUBLAS + LT, CUBLAS + LT, 2 * CUBLAS), id="usual"),
        pytest.param(
            {"CUBLAS_WORKSPACE_CONFIG": ":4096:1"}, (5 * 2**20, 5 * 2**20, 2**23), id="set"
        ),
        pytest.param(
            {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, (CUBLAS,) * 2 + (2 * CUBLAS,), id="one"
        ),
    ],
)
def test_kept_workspaces_are_one_time_bytes(python, settings, expected):
    """Workspaces that are kept count as one-time bytes; for an A100, 9.12 MB were published.

    A backward thread has its own.
    """
    kept = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
    run = python("-c", KEPT, forked=True, **{**kept, **settings})
    assert run.stdout.split() == [*map(str, expected), "0"], run.stderr
