"""What a user has set in PyTorch for the whole process changes no result, and is put back."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from cka import CKA, CKAResult, cka_from_features
from cka.functional.precision import full_precision

CPU = torch.device("cpu")
PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def settings() -> dict[str, object]:
    """All that can be asked about products of float32; PyTorch raises where its ways disagree."""
    return {
        "all": torch.backends.fp32_precision,
        "products": [one.fp32_precision for one in PRODUCTS],
        "old": answer(torch.get_float32_matmul_precision),
        "oldest": answer(lambda: torch.backends.cuda.matmul.allow_tf32),
    }


def answer(question: Callable[[], object]) -> object:
    try:
        return question()
    except RuntimeError:
        return "disagreed"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Every setting back to what a new process has."""
    yield
    torch.set_float32_matmul_precision("highest")
    for one in PRODUCTS:
        one.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


def set_all() -> None:
    torch.backends.fp32_precision = "tf32"


def set_each() -> None:
    for one in PRODUCTS:
        one.fp32_precision = "tf32"


def set_one() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def set_the_old_way() -> None:
    torch.set_float32_matmul_precision("medium")


def set_the_oldest_way() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def set_both_ways() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


WAYS = [set_all, set_each, set_one, set_the_old_way, set_the_oldest_way, set_both_ways]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@every_way
def test_products_are_exact_inside_and_as_set_outside(way: Callable[[], None]) -> None:
    """And inside PyTorch's ways agree, so that a kernel may ask in either."""
    way()
    before = settings()
    with full_precision(CPU):
        inside = settings()
    assert inside["old"] == "highest"
    assert inside["oldest"] is False
    assert set(inside["products"]) <= {"none", "ieee"}
    assert settings() == before


def test_what_followed_the_setting_for_all_still_does() -> None:
    """What is put back is not a setting of its own."""
    set_all()
    with full_precision(CPU):
        pass
    torch.backends.fp32_precision = "ieee"
    assert [one.fp32_precision for one in PRODUCTS] == ["ieee", "ieee"]


@every_way
def test_a_comparison_runs_whatever_is_set(way: Callable[[], None]) -> None:
    """PyTorch raises for a mixture of its ways: to ask in the old one was enough."""
    way()
    model = nn.Linear(4, 4)
    result = CKA(model, model).compare([torch.randn(8, 4)], progress=False)
    assert result.matrix.item() == pytest.approx(1)


def test_an_exception_puts_all_back() -> None:
    """As any other end does."""
    set_the_old_way()
    before = settings()
    with pytest.raises(ValueError, match="in a kernel"), full_precision(CPU):
        raise ValueError("in a kernel")
    assert settings() == before


def test_no_warning_is_ours() -> None:
    """Torch 2.9 warns of the old way; where warnings are errors, a comparison would end."""
    program = """
import warnings
import torch
from cka import CKA
warnings.simplefilter("error")
model = torch.nn.Linear(4, 4)
CKA(model, model).compare([torch.randn(8, 4)], progress=False)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_autocast_does_not_reach_a_kernel() -> None:
    """It would make a Gram matrix of half precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision(CPU):
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.float32
        assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.bfloat16


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "setting",
    [
        # Where nothing can be computed: whatever went there unasked would break.
        pytest.param(lambda: torch.device("meta"), id="default-device"),
        pytest.param(lambda: default_dtype(torch.float64), id="float64-by-default"),
        pytest.param(lambda: default_dtype(torch.float16), id="float16-by-default"),
        pytest.param(deterministic, id="deterministic"),
        pytest.param(torch.no_grad, id="no-grad"),
        pytest.param(torch.inference_mode, id="inference"),
    ],
)
def test_results_are_the_same_and_on_the_cpu(
    setting: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    """Of every estimator and kernel, of features, and of what was saved."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    batches, other = torch.randn(4, 16, 6), torch.randn(16, 3)

    def results() -> list[torch.Tensor]:
        found = []
        for kernel in ("linear", "rbf"):
            for estimator in ("unbiased", "biased", "exact"):
                compared = CKA(model, model, kernel=kernel, estimator=estimator)
                found.append(compared.compare(list(batches), progress=False).matrix)
            found.append(cka_from_features([batches[0], other], other, kernel=kernel))
        result = CKA(model, model).compare(list(batches), progress=False)
        result.save(tmp_path / "cka.json")
        return [*found, CKAResult.load(tmp_path / "cka.json").matrix]

    expected = results()
    with setting():
        found = results()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
