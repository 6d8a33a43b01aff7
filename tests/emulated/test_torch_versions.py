"""The table of what the emulated device takes from torch's own code is the one that is used."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

import emulated_cuda
from emulated_cuda import torch_private, torch_versions, triton, values
from emulated_cuda.torch_versions import Row

ROWS = {name: row for name, row in vars(torch_versions).items() if isinstance(row, Row)}
FOLDER = Path(emulated_cuda.__file__).parent
OTHERS = sorted({*FOLDER.rglob("*.py")} - {Path(torch_versions.__file__)})


@pytest.mark.parametrize("name", ROWS)
def test_row_is_used_by_the_code(name):
    """Each row of ``torch_versions.py`` is used by the code, since an unused one could be wrong."""
    uses = [path for path in OTHERS if re.search(rf"\b{name}\.value\b", path.read_text("utf-8"))]
    assert uses


@pytest.mark.parametrize("name", ROWS)
def test_row_was_seen_in_versions_that_were_tried(name):
    """The oldest and the newest version of each row are among the versions that were tried."""
    row = ROWS[name]
    assert torch_versions.OLDEST_TRIED <= row.oldest <= row.newest <= torch_versions.NEWEST_TRIED
    assert row.what


def test_texts_of_errors_are_matched_by_rows_only():
    """Texts of errors are matched in ``torch_versions.py`` only, not in any other module.

    The modules of ``triton`` match the text of kernels, which is Triton's.
    """
    found = []
    for path in OTHERS:
        if path.parent.name == "triton":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            compiles = isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
            compares = isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)
            if compiles or (compares and ast.unparse(node.comparators[0]) == "str(error)"):
                found.append((path.name, node.lineno, ast.unparse(node)))
    assert found == []


def test_installed_torch_has_the_needed_names():
    """The installed torch has the names that computing values needs, as every supported one."""
    assert torch_private.missing() == []


def test_installed_compilers_have_the_methods_that_are_replaced():
    """Triton and Inductor have the methods that measure, and the one that loads a kernel."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    assert callable(getattr(autotuner, triton.MEASURE))
    compiled = importlib.import_module("triton.compiler.compiler").CompiledKernel
    assert callable(getattr(compiled, triton.LOAD))
    heuristics, selection = map(importlib.import_module, torch_versions.MEASURING.value)
    assert callable(heuristics.CachingAutotuner.bench)
    assert callable(selection.AlgorithmSelectorCache.make_benchmark_fn)
    assert callable(selection.AlgorithmSelectorCache.make_precompile_fn)
    library_choice = torch_versions.LIBRARY_CHOICE.value
    assert isinstance(getattr(selection, library_choice), type)
    module, name = torch_versions.PACKAGING.value
    assert callable(getattr(importlib.import_module(module), name))


REFUSED_TYPES = {
    "float8": lambda: torch.ones(2).to(torch.float8_e5m2).sin(),
    "complex": lambda: torch.ones(2, dtype=torch.complex64).sort(),
}
REFUSED_VALUES = {
    "probability": lambda: torch.multinomial(torch.tensor([-1.0, 1.0]), 1),
    "index": lambda: torch.ones(2).index_select(0, torch.tensor([5])),
    "gather": lambda: torch.ones(2).gather(0, torch.tensor([5])),
    "bincount": lambda: torch.bincount(torch.tensor([-1])),
    "target": lambda: torch.nn.functional.nll_loss(torch.ones(1, 2), torch.tensor([7])),
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor([7]), torch.ones(2, 2)),
}


def _error_of(call) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011  the text is what is looked at
        call()
    return raised.value


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_error_about_types_is_recognized_by_its_text(name):
    """An error about types is recognized by the text of the installed version."""
    assert values.is_unsupported(_error_of(REFUSED_TYPES[name]))


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_error_about_a_value_is_recognized_by_its_text(name):
    """An error about a value is recognized by the text of the installed version."""
    error = _error_of(REFUSED_VALUES[name])
    assert values.is_assert(error)
    assert not values.is_unsupported(error)


def test_refused_number_is_recognized_by_its_text():
    """A number that torch's operator refuses in place of a tensor is recognized by the text."""
    error = _error_of(lambda: torch.ops.aten.atan2.default(torch.ones(1), [1.0]))
    assert torch_versions.NOT_A_TENSOR.value in str(error)
