"""What torch imports of CUDA's libraries: each function is ours, or one of cuDNN's own work."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

LISTED = Path(__file__).with_name("symbols.txt").read_text(encoding="ascii").split()
"""What torch 2.9 for CUDA 12.8, 2.14 for 13.0 and 2.15 for 13.2 import, or look up by name."""

OF_CUDA = re.compile(r"(__)?(cuda|cublas|cublasLt|cudnn|cupti|cu|nvrtc|nccl)[A-Z]\w*")

# What needs no device: descriptors, and what the library knows of itself.
OF_CUDNN = re.compile(
    r"cudnn(Backend|Create|Destroy"
    r"|Get(Version|Property|CudartVersion|ErrorString|LastErrorString|TensorNd|FilterNd)"
    r"|Set(Tensor|Filter|Convolution|Activation|Pooling2d|RNN|CTC|Spatial))"
)


def names(*arguments: str) -> set[str]:
    """The names that ``nm`` prints, without versions."""
    run = subprocess.run(["nm", "-D", *arguments], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in run.stdout.splitlines() if line}


@pytest.fixture(scope="module")
def exported(emulation) -> set[str]:
    """The names that the library defines."""
    spec = find_spec("emulated_cuda._cuda")
    assert spec is not None
    assert spec.origin is not None
    return names("--defined-only", spec.origin)


def test_every_listed_function_is_defined(exported):
    """The library defines every listed function except cuDNN's own, which the real one has."""
    assert [name for name in LISTED if name not in exported and not OF_CUDNN.match(name)] == []


def test_library_exports_nothing_but_functions_of_cuda(exported):
    """The library is loaded before all others, so it exports nothing but functions of CUDA."""
    prefixes = ("cu", "__cuda", "nvrtc", "nccl", "emulated_")
    assert [name for name in exported if not name.startswith(prefixes)] == []


def test_installed_torch_imports_nothing_that_is_not_listed(emulation):
    """A newer torch may import another function: add it to the
    library, and its name to the list.
    """
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    imported = set()
    for file in folder.glob("lib*.so"):
        imported |= {
            name for name in names("--undefined-only", str(file)) if OF_CUDA.fullmatch(name)
        }
    # c10 looks these up by name
    strings = re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", (folder / "libc10_cuda.so").read_bytes())
    imported |= {name.decode() for name in strings}
    assert sorted(imported - set(LISTED)) == []
