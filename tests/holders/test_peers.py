"""Published CKA libraries, used as in their documentation: the leak of one is found and named.

Neither is installed with this package, and one has the same import name as ours. So both are looked
for in a folder of their own, which the environment variable ``CKA_PEERS`` names.
"""

import os
from pathlib import Path

import pytest

NETWORK = """
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

def network():
    torch.manual_seed(0)
    model = models.resnet18(weights=None)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.fc.in_features, 10)
    return model.eval()

def images(batches=2):
    pixels, labels = torch.rand(4 * batches, 3, 32, 32), torch.zeros(4 * batches)
    return DataLoader(TensorDataset(pixels, labels), batch_size=4)
"""
TORCH_CKA = """
from torch_cka import CKA

@pytest.mark.max_retained_mb(1)
def test_it(cka_memory):
    model, loader = network(), images()
    with cka_memory.measure(), torch.no_grad():
        cka = CKA(model, model, model1_name="first", model2_name="second", device="cpu")
        cka.compare(loader, loader)
"""
PYTORCH_CKA = """
import cka as package
from cka import CKA

@pytest.mark.max_retained_mb(1)
@pytest.mark.flat_per_batch
def test_it(cka_memory):
    assert "pytorch_cka" in package.__file__
    model, loader = network(), images(batches=5)
    with cka_memory.measure() as region:
        with CKA(model, model, device=cka_memory.device) as cka:
            cka.compare(region.batches(loader), progress=False)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a test against one library in a process of its own."""

    def run_with(folder: str, package: str, source: str) -> pytest.RunResult:
        root = Path(os.environ.get("CKA_PEERS", "no-peers")).absolute() / folder
        if not root.is_dir():
            pytest.skip(
                f"{package} is not in the folder that CKA_PEERS names; to run it, run "
                f"pip install --no-deps --target <folder>/{folder} "
                f"{package}, and set CKA_PEERS=<folder>"
            )
        monkeypatch.setenv("PYTHONPATH", str(root))
        monkeypatch.setenv("MPLBACKEND", "agg")
        pytester.makepyfile(test_it=NETWORK + source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider")

    return run_with


def test_the_leak_of_torch_cka_is_found_and_its_holder_named(run) -> None:
    """For the leak in torch-cka, the report names its dict of features and the line of its code."""
    result = run("torch_cka", "torch-cka==0.21", TORCH_CKA)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*max_retained_mb(1) broken: retained *"])
    text = result.stdout.str()
    assert "model1_features" in text
    assert "torch_cka/cka.py:" in text
    assert "in CKA.compare" in text


def test_pytorch_cka_passes(run) -> None:
    """Used as in its notebook, pytorch-cka retains nothing and does not grow."""
    result = run("pytorch_cka_013", "pytorch-cka==0.1.3", PYTORCH_CKA)
    result.assert_outcomes(passed=1)
