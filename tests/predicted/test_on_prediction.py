"""The predicted meter, each claim in a process where nothing else has set up a device."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    """Run Python with arguments, in an environment that says nothing of CUDA's settings."""
    alien = ("PYTORCH_", "TORCH_", "CUBLAS", "PYTEST_", "CI")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(alien)}
    environment.update(OMP_NUM_THREADS="1", COLUMNS="100", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            env={**environment, **variables},
            cwd=HERE.parents[1],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def told(python) -> str:
    """What the session over ``on_prediction.py`` printed, run once for all of its tests."""
    options = ("-pno:cacheprovider", "-pno:randomly", "-rA", "--tb=short")
    return python("-m", "pytest", str(SOURCE), "--cka-memory-device=predict:cuda", *options).stdout


@pytest.mark.predicts
@pytest.mark.parametrize("name", NAMES)
def test_what_is_claimed_of_it_holds(told, name):
    """``on_prediction.py`` says what that is; every case of it passes."""
    outcomes = re.findall(rf"^(\w+) \S*on_prediction\.py::{name}(?:\[|\s|$)", told, re.MULTILINE)
    assert outcomes, told
    assert set(outcomes) == {"PASSED"}, told


@pytest.mark.predicts
def test_a_prediction_is_the_same_in_every_process(python):
    """To the byte, five times."""
    told = [python("-c", SIZES) for _ in range(5)]
    assert told[0].stdout.startswith("{"), told[0].stderr
    assert len({one.stdout for one in told}) == 1


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
    """9.125 MiB, as the notebook this project grew from saw them; none of it is retained."""
    settings = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
    said = python("-c", KEPT, **settings)
    assert said.stdout.split() == [str(int(9.125 * 2**20))] * 2 + ["0"], said.stderr


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
def test_expandable_segments_are_asked_for_as_in_pytorch(python, variables, reserved_mb):
    """By the environment, under both of its names."""
    said = python("-c", EXPANDING, **variables)
    assert said.stdout.split() == [str(reserved_mb)], said.stderr


@pytest.mark.predicts
def test_a_workspace_of_nothing_is_none(python):
    """As the environment may ask of PyTorch."""
    none = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    said = python("-c", KEPT, TORCH_CUBLAS_WORKSPACE_CACHE="1", **none)
    assert said.stdout.split() == ["0", "0", "0"], said.stderr


MANY = """
from pytest_cka_memory.meters import faking

for number in range(65):
    print(faking.claim(lambda *_: None), end=" ")
"""


@pytest.mark.predicts
def test_a_process_has_an_end_of_cards(python):
    """Torch has room for so many devices of a type."""
    said = python("-c", MANY)
    assert said.stdout.split()[-1] == "predicted:63"
    assert "a process predicts for 64 cards at most" in said.stderr


TAKEN = """
import torch
torch.utils.rename_privateuse1_backend("abacus")
from pytest_cka_memory import MemoryProbe
MemoryProbe("predict:cuda")
"""


@pytest.mark.predicts
def test_a_device_type_that_is_taken_is_said_to_be(python):
    """Torch has one to spare in a process."""
    assert "taken by 'abacus' in this process" in python("-c", TAKEN).stderr


@pytest.mark.predicts
@pytest.mark.parametrize("batch_size", [256, 512])
def test_the_gates_that_a_cpu_skips_are_predicted(python, batch_size):
    """No gigabyte is allocated for them."""
    gate = f"{GATES / 'test_self_comparison.py'}::test_compare_retains_no_memory[{batch_size}]"
    options = ("-pno:cacheprovider", "-pno:randomly", "--cka-memory-report")
    run = python("-m", "pytest", gate, "--cka-memory-device=predict:cuda", *options)
    assert "1 passed" in run.stdout, run.stdout


OLDER = """
from torch.utils import backend_registration

vars(backend_registration).pop("_setup_privateuseone_for_python_backend", None)
"""


def test_an_older_torch_is_refused(python):
    """With what it lacks."""
    said = python("-c", OLDER + SIZES).stderr
    assert "predict:cuda needs a torch that has torch.utils.backend_registration._" in said
