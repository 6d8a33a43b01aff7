"""Under which name the installed torch reads the settings of its allocator."""

from importlib import metadata

import pytest

from emulated_cuda import torch_versions


@pytest.mark.parametrize(
    ("installed", "name"),
    [
        ("2.9.1+cu128", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.10.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.11.0+cu130", "PYTORCH_ALLOC_CONF"),
        ("3.0.0a0+git1234", "PYTORCH_ALLOC_CONF"),
        ("unknown", "PYTORCH_ALLOC_CONF"),
        (None, "PYTORCH_ALLOC_CONF"),
    ],
)
def test_name_of_the_variable_depends_on_the_version(monkeypatch, installed, name):
    """Torch 2.9.1 ignores the name that it recommends."""

    def version(distribution: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(distribution)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    assert torch_versions.allocator_variable.__wrapped__() == name


SETTING = """
import emulated_cuda
emulated_cuda.load("t4", values=False)
import torch
torch.ones(1, device="cuda")
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""


@pytest.mark.emulates
def test_the_installed_torch_reads_it(python):
    """A setting under this name has an effect."""
    variables = {torch_versions.allocator_variable(): "expandable_segments:True"}
    assert python("-c", SETTING, forked=True, **variables).stdout == "True\n"
