"""cuBLAS workspaces: which operators allocate one, how large it is, and how long it is kept."""

import pytest

from pytest_cka_memory.core.cards import CARDS, CONTEXT_BYTES, card_of
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.predicted.workspaces import Workspaces

MB = 2**20
USUAL = 8 * MB + 128 * 2**10
SQUARE = (64, 64)
KEPT = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
SEPARATE = {**KEPT, "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}


def workspaces(environ, torch_version="2.15.0"):
    return Workspaces.from_environment(environ, torch_version, USUAL)


@pytest.mark.parametrize("operator", ["mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmm_"])
def test_matrix_products_allocate_a_workspace(operator):
    """In place or not. cuBLASLt cannot add a bias of the product's own shape."""
    assert workspaces({}).needed_by(f"aten::{operator}", [SQUARE] * 3) == ("cuBLAS", USUAL)


@pytest.mark.parametrize(
    "operator",
    ["_euclidean_dist", "_trilinear", "addbmm", "linalg_solve_triangular", "triangular_solve"],
)
def test_operators_that_call_cublas_inside_allocate_its_workspace(operator):
    """``cdist`` and ``bilinear`` are among them under the names of their parts."""
    assert workspaces({}).needed_by(f"aten::{operator}", [SQUARE] * 3) == ("cuBLAS", USUAL)


@pytest.mark.parametrize("operator", ["mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "addbmm"])
def test_products_with_an_empty_dimension_allocate_no_workspace(operator):
    """They return before they call cuBLAS."""
    assert workspaces({}).needed_by(f"aten::{operator}", [(64, 0), (0, 64)]) is None


@pytest.mark.parametrize("operator", ["dot", "vdot", "linalg_solve_triangular"])
def test_some_operators_allocate_a_workspace_without_elements(operator):
    """They call cuBLAS whatever the sizes are."""
    assert workspaces({}).needed_by(f"aten::{operator}", [(0,), (0,)]) == ("cuBLAS", USUAL)


@pytest.mark.parametrize("operator", ["add", "convolution", "relu", "sum"])
def test_other_operators_allocate_no_workspace(operator):
    """Workspaces of cuDNN are not modelled."""
    assert workspaces({}).needed_by(f"aten::{operator}", [SQUARE] * 3) is None


@pytest.mark.parametrize(
    ("shapes", "library"),
    [
        pytest.param([(64,), SQUARE, SQUARE], "cuBLASLt", id="row-of-biases"),
        pytest.param([(1,), SQUARE, SQUARE], "cuBLAS", id="one-bias-for-all"),
        pytest.param([SQUARE, SQUARE, SQUARE], "cuBLAS", id="matrix"),
        pytest.param([(1,), SQUARE, (64, 1)], "cuBLAS", id="one-column"),
    ],
)
def test_a_linear_layer_allocates_the_workspace_of_cublaslt(shapes, library):
    """It is 1 MiB, and only used if cuBLASLt can add the bias itself."""
    size = MB if library == "cuBLASLt" else USUAL
    assert workspaces({}).needed_by("aten::addmm", shapes) == (library, size)


@pytest.mark.parametrize(
    ("version", "kept"), [("2.14.1", True), ("2.15.0+cu132", False), ("3.0.0", False)]
)
def test_a_workspace_is_freed_with_its_operator_since_torch_2_15(version, kept):
    """Before, it was kept for its stream."""
    assert workspaces({}, version).kept is kept


@pytest.mark.parametrize(("value", "kept"), [("0", False), ("1", True), ("yes", False)])
def test_an_environment_variable_decides_whether_a_workspace_is_kept(value, kept):
    """Its values are 0 and 1; PyTorch ignores any other."""
    assert workspaces({"TORCH_CUBLAS_WORKSPACE_CACHE": value}).kept is kept


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(KEPT, ("cuBLAS", USUAL), id="shared"),
        pytest.param(SEPARATE, ("cuBLASLt", MB), id="separate"),
    ],
)
def test_both_libraries_share_one_kept_workspace(environ, expected):
    """Unless an environment variable separates them."""
    assert workspaces(environ).needed_by("aten::addmm", [(64,), SQUARE, SQUARE]) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param(":4096:8", 32 * MB, id="one-pair"),
        pytest.param(":16:8:4096:2", USUAL, id="two-pairs"),
        pytest.param(":0:0", 0, id="none"),
        pytest.param("4096", USUAL, id="unreadable"),
    ],
)
def test_environment_variables_decide_the_size_of_a_workspace(text, size):
    """As pairs of a size in KiB and a count, which are summed."""
    assert workspaces({"CUBLAS_WORKSPACE_CONFIG": text}).cublas_bytes == size
    assert workspaces({"CUBLASLT_WORKSPACE_SIZE": "64"}).lt_bytes == 64 * 2**10


def test_the_workspace_of_a_hopper_card_is_32_mib():
    """That of other cards is 8.125 MiB."""
    assert CARDS["h100"].workspace_bytes == 32 * MB
    assert CARDS["a100"].workspace_bytes == USUAL


@pytest.mark.parametrize("name", CARDS)
def test_the_capacity_of_a_card_excludes_its_context(name):
    """PyTorch cannot reserve the memory of the CUDA context."""
    assert CARDS[name].capacity_bytes == CARDS[name].total_bytes - CONTEXT_BYTES
    assert card_of(name).name == name


def test_an_empty_name_means_the_default_card():
    """Predictions are checked against published figures for this card."""
    assert card_of("").name == "a100"


@pytest.mark.parametrize("name", ["A100", "b9000", "a100:0"])
def test_an_unknown_card_is_refused_with_a_list_of_known_cards(name):
    """The message quotes the unknown name."""
    with pytest.raises(
        DeviceError, match=rf"unknown card '{name}'; write .* a100, a100-40gb, h100"
    ):
        card_of(name)
