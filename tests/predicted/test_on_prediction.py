"""The predicted meter, tested in processes where no other device is registered."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked_processes
import pytest

HERE = Path(__file__).parent
SOURCE = HERE / "on_prediction.py"
GATES = HERE.parent / "gates"
NAMES = [
    node.name
    for node in ast.parse(SOURCE.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]

SIZES = """
import json, sys, torch
from pytest_cka_memory import MemoryProbe

probe = MemoryProbe("predict:cuda")
layers = torch.nn.Conv2d(3, 64, 3), torch.nn.Flatten(), torch.nn.Linear(57600, 9)
model = torch.nn.Sequential(*layers).to(probe.device)
with probe.measure() as region:
    for batch in region.batches([torch.zeros(size, 3, 32, 32) for size in (64, 7, 64, 64, 64, 64)]):
        model(batch.to(probe.device)).sum().backward()
print(json.dumps(region.record.to_dict(), sort_keys=True))
"""


@pytest.fixture(scope="module")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with arguments in an environment without CUDA settings.

    It is a process that has imported torch already, or a new interpreter (``forked=False``).
    """
    removed = ("PYTORCH_", "TORCH_", "CUBLAS", "PYTEST_", "CI")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(removed)}
    environment.update(OMP_NUM_THREADS="1", COLUMNS="100", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def run(*args: str, forked: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        given, folder = {**environment, **variables}, HERE.parents[1]
        if forked:
            return forked_processes.run(["python", *args], folder=folder, environment=given)
        return subprocess.run(
            [sys.executable, *args],
            env=given,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def output(python) -> str:
    """Return the output of one session that runs all tests of ``on_prediction.py``."""
    options = ("-pno:cacheprovider", "-pno:randomly", "-rA", "--tb=short")
    return python("-m", "pytest", str(SOURCE), "--cka-memory-device=predict:cuda", *options).stdout


@pytest.mark.predicts
@pytest.mark.parametrize("name", NAMES)
def test_test_on_the_predicted_device_passes(output, name):
    """All cases of the test pass; its docstring says what it checks."""
    outcomes = re.findall(rf"^(\w+) \S*on_prediction\.py::{name}(?:\[|\s|$)", output, re.MULTILINE)
    assert outcomes, output
    assert set(outcomes) == {"PASSED"}, output


@pytest.mark.predicts
def test_prediction_is_the_same_in_every_process(python):
    """Hashes and addresses differ between them."""
    runs = [python("-c", SIZES, forked=False, PYTHONHASHSEED=seed) for seed in "123"]
    assert runs[0].stdout.startswith("{"), runs[0].stderr
    assert len({run.stdout for run in runs}) == 1


KEPT = """
import torch
from pytest_cka_memory import MemoryProbe

probe = MemoryProbe("predict:cuda")
square = torch.ones(64, 64, device=probe.device)
layer = torch.nn.Linear(64, 64).to(probe.device)
with probe.measure() as outer:
    with probe.measure() as region:
        square @ square
        layer(square)
print(region.record.one_time_bytes, outer.record.one_time_bytes, region.retained_bytes)
"""


@pytest.mark.predicts
def test_kept_workspaces_are_one_time_bytes(python):
    """They have 9.125 MiB, as measured in the original notebook; none of it is retained."""
    settings = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
    run = python("-c", KEPT, **settings)
    assert run.stdout.split() == [str(int(9.125 * 2**20))] * 2 + ["0"], run.stderr


IN_BACKWARD = """
import torch
from pytest_cka_memory import MemoryProbe

probe = MemoryProbe("predict:cuda")
weights = torch.ones(64, 64, device=probe.device, requires_grad=True)
with probe.measure() as region:
    (weights @ weights).sum().backward()
print(region.record.one_time_bytes)
"""


@pytest.mark.predicts
def test_backward_thread_keeps_a_workspace_of_its_own(python):
    """Each has 8.125 MiB, that of the forward and that of the backward pass."""
    run = python("-c", IN_BACKWARD, TORCH_CUBLAS_WORKSPACE_CACHE="1")
    assert run.stdout.split() == [str(2 * 8519680)], run.stderr


EXPANDING = """
import torch
from pytest_cka_memory import MemoryProbe

probe = MemoryProbe("predict:cuda")
with probe.measure() as region:
    for size in range(20, 40, 4):
        torch.ones(size * 2**20, dtype=torch.uint8, device=probe.device)
print(region.record.reserved_peak_bytes // 2**20)
"""


@pytest.mark.predicts
@pytest.mark.parametrize(
    ("variables", "reserved_mb"),
    [
        pytest.param({}, 140, id="segments"),
        pytest.param({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 40, id="expandable"),
        pytest.param({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, 40, id="old-name"),
    ],
)
def test_expandable_segments_are_enabled_as_in_pytorch(python, variables, reserved_mb):
    """The environment variable is read under both of its names."""
    run = python("-c", EXPANDING, **variables)
    assert run.stdout.split() == [str(reserved_mb)], run.stderr


@pytest.mark.predicts
def test_workspace_of_size_0_adds_no_bytes(python):
    """The environment can set the sizes of PyTorch's workspaces to 0."""
    none = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    run = python("-c", KEPT, TORCH_CUBLAS_WORKSPACE_CACHE="1", **none)
    assert run.stdout.split() == ["0", "0", "0"], run.stderr


MANY = """
from pytest_cka_memory.meters.predicted import device

for number in range(65):
    print(device.register_device(lambda *_: None), end=" ")
"""


@pytest.mark.predicts
def test_process_has_at_most_64_predicted_cards(python):
    """Torch supports a limited number of devices per type."""
    run = python("-c", MANY)
    assert run.stdout.split()[-1] == "predicted:63"
    assert "a process has 64 at most" in run.stderr


TAKEN = """
import torch
torch.utils.rename_privateuse1_backend("abacus")
from pytest_cka_memory import MemoryProbe
MemoryProbe("predict:cuda")
"""


@pytest.mark.predicts
def test_error_names_the_backend_that_already_uses_the_device_type(python):
    """Torch has only one such device type per process."""
    assert "taken by 'abacus' in this process" in python("-c", TAKEN).stderr


@pytest.mark.predicts
@pytest.mark.parametrize("batch_size", [256, 512])
def test_gates_that_the_cpu_skips_pass_on_a_predicted_device(python, batch_size):
    """The CPU skips these gates because they take minutes there."""
    gate = f"{GATES / 'test_self_comparison.py'}::test_compare_retains_no_memory[{batch_size}]"
    options = ("-pno:cacheprovider", "-pno:randomly", "--cka-memory-report")
    run = python("-m", "pytest", gate, "--cka-memory-device=predict:cuda", *options)
    assert "1 passed" in run.stdout, run.stdout


OLDER = """
from torch.utils import backend_registration

vars(backend_registration).pop("_setup_privateuseone_for_python_backend", None)
"""


def test_older_torch_version_is_refused(python):
    """The error names the function that the older version lacks."""
    run = python("-c", OLDER + SIZES).stderr
    assert "predict:cuda needs torch.utils.backend_registration._" in run
