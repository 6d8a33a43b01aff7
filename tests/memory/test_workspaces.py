"""cuBLAS workspaces: who takes one, how large, and for how long."""

import pytest

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.predicted.cards import CARDS, CONTEXT_BYTES, card_of
from pytest_cka_memory.meters.predicted.workspaces import Workspaces

MB = 2**20
USUAL = 8 * MB + 128 * 2**10
SQUARE = (64, 64)
KEPT = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
SEPARATE = {**KEPT, "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}


def by(environ, torch_version="2.15.0"):
    return Workspaces.by(environ, torch_version, USUAL)


@pytest.mark.parametrize("operator", ["mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmm_"])
def test_matrix_products_take_a_workspace(operator):
    """In place or not; a bias as wide as the product itself is none to cuBLASLt."""
    assert by({}).of(f"aten::{operator}", [SQUARE] * 3) == ("cuBLAS", USUAL)


@pytest.mark.parametrize("operator", ["add", "convolution", "relu", "sum"])
def test_other_operators_take_none(operator):
    """What cuDNN takes is not modelled."""
    assert by({}).of(f"aten::{operator}", [SQUARE] * 3) is None


@pytest.mark.parametrize(
    ("shapes", "library"),
    [
        pytest.param([(64,), SQUARE, SQUARE], "cuBLASLt", id="row-of-biases"),
        pytest.param([(1,), SQUARE, SQUARE], "cuBLAS", id="one-bias-for-all"),
        pytest.param([SQUARE, SQUARE, SQUARE], "cuBLAS", id="matrix"),
        pytest.param([(1,), SQUARE, (64, 1)], "cuBLAS", id="one-column"),
    ],
)
def test_a_linear_layer_takes_that_of_cublaslt(shapes, library):
    """1 MiB, where cuBLASLt can add the bias itself."""
    size = MB if library == "cuBLASLt" else USUAL
    assert by({}).of("aten::addmm", shapes) == (library, size)


@pytest.mark.parametrize(
    ("version", "kept"), [("2.14.1", True), ("2.15.0+cu132", False), ("3.0.0", False)]
)
def test_a_workspace_lives_as_long_as_its_operator_since_torch_2_15(version, kept):
    """Before, as long as its stream."""
    assert by({}, version).kept is kept


@pytest.mark.parametrize(("value", "kept"), [("0", False), ("1", True), ("yes", False)])
def test_the_environment_decides_whether_it_is_kept(value, kept):
    """By 0 or 1; PyTorch takes anything else for nothing."""
    assert by({"TORCH_CUBLAS_WORKSPACE_CACHE": value}).kept is kept


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(KEPT, ("cuBLAS", USUAL), id="shared"),
        pytest.param(SEPARATE, ("cuBLASLt", MB), id="separate"),
    ],
)
def test_kept_workspaces_are_one_for_both_libraries(environ, expected):
    """Unless the environment says otherwise."""
    assert by(environ).of("aten::addmm", [(64,), SQUARE, SQUARE]) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param(":4096:8", 32 * MB, id="one-pair"),
        pytest.param(":16:8:4096:2", USUAL, id="two-pairs"),
        pytest.param(":0:0", 0, id="none"),
        pytest.param("4096", USUAL, id="unreadable"),
    ],
)
def test_the_environment_decides_the_size(text, size):
    """As pairs of KiB and count, which are added up."""
    assert by({"CUBLAS_WORKSPACE_CONFIG": text}).cublas_bytes == size
    assert by({"CUBLASLT_WORKSPACE_SIZE": "64"}).lt_bytes == 64 * 2**10


def test_a_hopper_card_gets_32_mib():
    """The others get 8.125."""
    assert CARDS["h100"].workspace_bytes == 32 * MB
    assert CARDS["a100"].workspace_bytes == USUAL


@pytest.mark.parametrize("name", CARDS)
def test_every_card_leaves_room_for_its_context(name):
    """What PyTorch can reserve is less than what the card has."""
    assert CARDS[name].capacity_bytes == CARDS[name].total_bytes - CONTEXT_BYTES
    assert card_of(name).name == name


def test_no_name_is_the_default_card():
    """That whose published figures predictions are held to."""
    assert card_of("").name == "a100"


@pytest.mark.parametrize("name", ["A100", "b9000", "a100:0"])
def test_an_unknown_card_is_refused_with_those_known(name):
    """By its own name."""
    with pytest.raises(
        DeviceError, match=rf"unknown card '{name}'; write .* a100, a100-40gb, h100"
    ):
        card_of(name)
