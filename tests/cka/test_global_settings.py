"""Process-wide settings of PyTorch do not change results, and are restored."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from cka import CKA, CKAResult, cka_from_features
from cka.functional import full_precision

CPU = torch.device("cpu")
PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def settings() -> dict[str, object]:
    """Return all settings for float32 products, as each of PyTorch's interfaces gives them."""
    return {
        "all": torch.backends.fp32_precision,
        "products": [one.fp32_precision for one in PRODUCTS],
        "legacy": value_or_conflict(torch.get_float32_matmul_precision),
        "oldest": value_or_conflict(lambda: torch.backends.cuda.matmul.allow_tf32),
    }


def value_or_conflict(read: Callable[[], object]) -> object:
    """Return a setting, or "conflict" if PyTorch raises because its interfaces disagree."""
    try:
        return read()
    except RuntimeError:
        return "conflict"


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    """Restore the settings of a new process after each test."""
    yield
    torch.set_float32_matmul_precision("highest")
    for one in PRODUCTS:
        one.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


def set_all() -> None:
    torch.backends.fp32_precision = "tf32"


def set_each_backend() -> None:
    for one in PRODUCTS:
        one.fp32_precision = "tf32"


def set_one_backend() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def set_legacy() -> None:
    torch.set_float32_matmul_precision("medium")


def set_oldest() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def set_conflicting() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


SETTERS = [set_all, set_each_backend, set_one_backend, set_legacy, set_oldest, set_conflicting]
every_setter = pytest.mark.parametrize("setter", SETTERS, ids=lambda setter: setter.__name__)


@every_setter
def test_full_precision_restores_every_kind_of_setting(
    setter: Callable[[], None],
) -> None:
    """In full precision PyTorch's interfaces agree, so a kernel can read the setting by each."""
    setter()
    before = settings()
    with full_precision(CPU):
        inside = settings()
    assert inside["legacy"] == "highest"
    assert inside["oldest"] is False
    assert set(inside["products"]) <= {"none", "ieee"}
    assert settings() == before


def test_inherited_setting_is_still_inherited_afterwards() -> None:
    """After full precision, backends without a setting follow
    torch.backends.fp32_precision again.
    """
    set_all()
    with full_precision(CPU):
        pass
    torch.backends.fp32_precision = "ieee"
    assert [one.fp32_precision for one in PRODUCTS] == ["ieee", "ieee"]


@every_setter
def test_comparison_runs_with_any_precision_setting(setter: Callable[[], None]) -> None:
    """Reading the legacy setting raises if the interfaces disagree; a comparison must not."""
    setter()
    model = nn.Linear(4, 4)
    result = CKA(model, model).compare([torch.randn(8, 4)], progress=False)
    assert result.matrix.item() == pytest.approx(1)


def test_settings_are_restored_after_an_exception() -> None:
    """An exception in a kernel does not leave full precision set."""
    set_legacy()
    before = settings()
    with pytest.raises(ValueError, match="in a kernel"), full_precision(CPU):
        raise ValueError("in a kernel")
    assert settings() == before


def test_comparison_emits_no_warning(run_python: Callable[..., str]) -> None:
    """Reading the legacy setting warns in torch 2.9, and a user may turn warnings into errors."""
    code = """
import warnings
import torch
from cka import CKA
warnings.simplefilter("error")
model = torch.nn.Linear(4, 4)
CKA(model, model).compare([torch.randn(8, 4)], progress=False)
"""
    run_python(code, forked=True)


def test_autocast_does_not_apply_to_a_kernel() -> None:
    """Autocast does not apply to a kernel, because the Gram matrix would be in half precision."""
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
        # The meta device cannot compute, so a tensor created there would make the test fail.
        pytest.param(lambda: torch.device("meta"), id="default-device"),
        pytest.param(lambda: default_dtype(torch.float64), id="float64-by-default"),
        pytest.param(lambda: default_dtype(torch.float16), id="float16-by-default"),
        pytest.param(deterministic, id="deterministic"),
        pytest.param(torch.no_grad, id="no-grad"),
        pytest.param(torch.inference_mode, id="inference"),
    ],
)
def test_results_do_not_depend_on_process_wide_settings(
    setting: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    """No process-wide setting changes a result, of any estimator, kernel or pooling."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    batches, other = torch.randn(4, 16, 6), torch.randn(16, 3)

    def results() -> list[torch.Tensor]:
        found = []
        for kernel in ("linear", "rbf"):
            for estimator in ("unbiased", "biased", "exact"):
                cka = CKA(model, model, kernel=kernel, estimator=estimator)
                found.append(cka.compare(list(batches), progress=False).matrix)
            found.append(cka_from_features([batches[0], other], other, kernel=kernel))
        # Texts of five tokens, with padding given as a list.
        masked = {"mask": lambda batch: [[1, 1, 1, 0, 0]] * 5 + [[0, 1, 1, 1, 1]] * 11}
        text = [batch[:, None] * torch.arange(5, device="cpu")[:, None] for batch in batches]
        for pooling, estimator in (("mean", "unbiased"), ("cls", "biased"), ("flatten", "exact")):
            cka = CKA(model, model, pooling=pooling, estimator=estimator, **masked)
            found.append(cka.compare(text, progress=False).matrix)
        result = CKA(model, model).compare(list(batches), progress=False)
        result.save(tmp_path / "cka.json")
        return [*found, CKAResult.load(tmp_path / "cka.json").matrix]

    expected = results()
    with setting():
        found = results()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
