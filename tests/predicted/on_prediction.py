"""Tests on a predicted A100; ``test_on_prediction.py`` runs them in a new process.

A process can register the device only once and cannot unregister it.
"""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cka import CKA
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.errors import PredictionError
from pytest_cka_memory.meters.selection import meter_for

pytestmark = pytest.mark.usefixtures("imports_excluded_from_collection")
MB = 2**20
WORKSPACE = 8 * MB + 128 * 2**10


@pytest.fixture
def device(cka_memory):
    return cka_memory.device


def filled(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, device=device)


def test_tensors_are_allocated_in_blocks_and_freed(cka_memory, device):
    """Retained bytes are exact, allocated bytes are in blocks, reserved bytes in segments."""
    with cka_memory.measure() as region:
        kept = filled(1000, device)
        with cka_memory.measure() as inner:
            filled(3 * MB, device)
    assert kept.device == device
    assert region.retained_bytes == 1000
    assert region.peak_increase_bytes == 1024 + 3 * MB
    assert region.reserved_peak_bytes - region.reserved_start_bytes in (20 * MB, 22 * MB)
    assert (inner.retained_bytes, inner.peak_increase_bytes) == (0, 3 * MB)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda d: torch.empty(256, device=d), id="empty"),
        pytest.param(lambda d: torch.randn(256, device=d), id="random"),
        pytest.param(lambda d: torch.tensor([0.0] * 256, device=d), id="from-numbers"),
        pytest.param(lambda d: torch.zeros(256).to(d), id="moved"),
        pytest.param(lambda d: torch.zeros(256, device=d).clone(), id="cloned"),
        pytest.param(lambda d: torch.zeros(256, device=d).new_tensor([0.0] * 256), id="new"),
        pytest.param(lambda d: torch.zeros(64, device=d).resize_(256), id="resized"),
        pytest.param(lambda d: torch.zeros(256, device=d).view(16, 16).t()[1:], id="view"),
        pytest.param(lambda d: copy.deepcopy(torch.zeros(256, device=d)), id="copied"),
    ],
)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_each_way_to_make_a_tensor_counts_once(cka_memory, device, make):
    """A view adds no bytes."""
    with cka_memory.measure() as region:
        kept = make(device)
    assert kept is not None
    assert region.retained_bytes == 1024


def test_cpu_tensors_keep_their_values(device):
    """CPU tensors, for example of a data loader, have values beside a predicted device."""
    filled(10, device)
    assert torch.ones(3).sum().item() == 3.0
    assert bool((torch.arange(4) > 2).any())


def test_result_moved_to_the_cpu_has_a_shape_but_no_value(device):
    """The value was never computed, so reading it is an error."""
    home = filled(10, device).sum().cpu()
    assert (home.device.type, home.shape) == ("cpu", torch.Size([]))
    with pytest.raises(PredictionError):
        home.item()


REFUSED = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense: it needs a value"),
    "tolist": (lambda x: x.tolist(), "_local_scalar_dense: it needs a value"),
    "branch": (lambda x: 1 if x.sum() > 0 else 2, "_local_scalar_dense: it needs a value"),
    "equal": (lambda x: torch.equal(x, x), "equal: it needs a value"),
    "numpy": (lambda x: x.cpu().numpy(), r"\.numpy\(\): it needs a value"),
    "mask": (lambda x: x[x > 0], "shape of its result depends .* torch.where"),
    "nonzero": (lambda x: x.nonzero(), "shape of its result depends"),
    "copied-to-cpu": (lambda x: torch.ones(4).copy_(x), "writes a predicted .* on cpu"),
    "other-card": (lambda x: x.to("predicted:63"), "there is no such card"),
    "no-rule": (lambda x: without_rule(x), "register_fake"),
    "autocast": (lambda x: halved(x), r"model\.bfloat16\(\)"),
}


@torch.library.custom_op("predicted_tests::without_rule", mutates_args=())
def without_rule(x: torch.Tensor) -> torch.Tensor:
    """A custom operator without a rule for the shape of its result."""
    return x.clone()


def halved(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return x @ x


@pytest.mark.parametrize("name", REFUSED)
def test_unpredictable_operation_is_refused_with_its_line(device, name):
    """The error names the operator, the reason and, if there is one, an alternative."""
    call, message = REFUSED[name]
    with pytest.raises(PredictionError, match=rf"on_prediction\.py:\d+ in .*{message}") as error:
        call(torch.ones(4, device=device))
    if name in ("item", "tolist", "branch", "equal", "mask"):
        assert "use --cka-memory-device=emulate:cuda, which computes values" in str(error.value)


def test_disabled_autocast_is_accepted(device):
    """Checkpoints and device-independent code disable autocast even if it was not enabled."""
    square = torch.ones(4, 4, device=device)
    with torch.autocast(device.type, enabled=False):
        assert (square @ square).dtype is torch.float32


def test_device_module_has_the_usual_functions(device):
    """Code for any device can call these functions, and never selects this device by itself."""
    module = torch.get_device_module(device)
    module.synchronize()
    module.empty_cache()
    assert 0 <= device.index < module.device_count()
    assert not module.is_available()


def test_compiled_code_is_refused_unless_it_runs_eagerly(device):
    """It runs if the compiler is set to run eagerly."""
    double = torch.compile(lambda x: x * 2)
    with pytest.raises(Exception, match=r"on_prediction\.py:\d+ .*cannot predict torch\.compile"):
        double(torch.ones(4, device=device))
    with torch.compiler.set_stance("force_eager"):
        assert double(torch.ones(4, device=device)).shape == (4,)


def test_shape_errors_are_raised_each_time(device):
    """They are raised the second time too, when the result could be cached."""
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.ones(3, 4, device=device) @ torch.ones(3, 4, device=device)
        with pytest.raises(RuntimeError):
            torch.ones(3, device=device).add_(torch.ones(4, device=device))


def test_cached_results_are_the_same(device):
    """The results for views and in-place operators are cached after the first call."""
    shapes = []
    for _ in range(3):
        base = torch.zeros(4, 6, device=device)
        view = base[1:3].t()
        written = view.add_(1)
        shapes.append((view.shape, view.stride(), view.storage_offset(), written is view))
        assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert shapes == [(torch.Size([6, 2]), (1, 6), 6, True)] * 3


LOSSES = {
    "mse": nn.functional.mse_loss,
    "smooth-l1": nn.functional.smooth_l1_loss,
    "soft-margin": nn.functional.soft_margin_loss,
    "huber": nn.functional.huber_loss,
    "l1": nn.functional.l1_loss,
    "bce": nn.functional.binary_cross_entropy,
    "bce-with-logits": nn.functional.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_storage_of_a_loss_has_the_same_size_as_on_the_cpu(device, name, reduction):
    """Some losses are scalars in a storage of the unreduced size, on every device."""
    sizes = []
    for place in ("cpu", device):
        values, target = torch.rand(2, 16, 64, device=place)
        for one in (values, values[:, ::2]):
            loss = LOSSES[name](one, target[:, : one.shape[1]], reduction=reduction)
            sizes.append(loss.untyped_storage().nbytes())
    assert sizes[:2] == sizes[2:]


def test_kept_losses_retain_their_unreduced_size(cka_memory, device):
    """On a GPU a gate on such losses fails, so it must fail here as well."""
    values, target = torch.rand(2, 512, 512, device=device)
    with cka_memory.measure() as region:
        kept = [nn.functional.mse_loss(values, target) for _ in range(8)]
    assert len(kept) == 8
    assert region.retained_bytes == 8 * MB
    assert region.peak_increase_bytes == 9 * MB


def test_empty_loss_retains_one_element(cka_memory, device):
    """Nothing was reduced."""
    empty = torch.rand(0, 4, device=device)
    with cka_memory.measure() as region:
        kept = nn.functional.mse_loss(empty, empty)
    assert kept.dim() == 0
    assert region.retained_bytes == 4


def test_optimizer_updates_all_parameters_together(cka_memory, device):
    """On CUDA optimizers choose this by default; it needs one temporary, not two."""
    parameter = nn.Parameter(torch.zeros(1024, 512, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    with cka_memory.measure() as region:
        optimizer.step()
    assert region.peak_increase_bytes == 2 * MB


def test_product_copies_a_matrix_that_cublas_cannot_read(cka_memory, device):
    """The gradient of a sum is such a matrix: one element, expanded."""
    square = torch.ones(1024, 1024, device=device)
    with cka_memory.measure() as region:
        torch.ones((), device=device).expand(1024, 1024) @ square
    assert region.peak_increase_bytes == 2 * 4 * MB + 512 + WORKSPACE


def test_operators_whose_temporaries_are_known_are_charged_for_them(cka_memory, device):
    """The result and the temporaries are counted, also if a tensor is empty."""
    square = torch.ones(512, 512, device=device)
    with cka_memory.measure() as region:
        square.logsumexp(1)
    assert region.peak_increase_bytes == MB + 2 * 2048
    with cka_memory.measure() as region:
        torch.cdist(square, square)
    assert region.peak_increase_bytes == MB + 2 * 514 * 512 * 4 + WORKSPACE
    with cka_memory.measure() as region:
        torch.cdist(square[:, :0], square[:, :0])
        square[:, :0] @ square[:0]
    assert region.peak_increase_bytes == MB


def test_training_step_counts_gradients_and_optimizer_state(cka_memory, device):
    """At the end weights, gradients and two moments of the optimizer are live."""
    model = nn.Linear(256, 256, bias=False).to(device)
    with cka_memory.measure() as region:
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(8, 256, device=device)).sum().backward()
        optimizer.step()
    weights = 256 * 256 * 4
    assert 3 * weights <= region.retained_bytes < 3 * weights + 1024


def test_error_in_a_backward_pass_is_raised_unchanged(device):
    """Errors of a user's hook and prediction errors are raised unchanged."""

    def fail(gradient):
        raise KeyError("a user's own")

    for hook, error in (
        (fail, KeyError),
        (lambda gradient: gradient.sum().item(), PredictionError),
    ):
        x = torch.ones(4, device=device, requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        with pytest.raises(error):
            y.sum().backward()


def test_tensors_of_a_failed_backward_pass_are_not_retained(cka_memory, device, fail_late):
    """As on a real card, torch's thread may free the tensors after the caller gets the error."""
    with cka_memory.measure() as region:
        fail_late(device)
    assert region.retained_bytes == 0
    assert region.peak_increase_bytes > 4000


def test_checkpoint_frees_tensors_that_it_recomputes(cka_memory, device):
    """A deep network needs less memory with checkpoints than without."""
    wide = nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)
    layers = [copy.deepcopy(nn.Sequential(*wide)).to(device) for _ in range(8)]
    peaks = []
    for keep in (True, False):
        with cka_memory.measure() as region:
            x = torch.ones(4096, 64, device=device, requires_grad=True)
            for layer in layers:
                x = layer(x) if keep else checkpoint(layer, x, use_reentrant=False)
            x.sum().backward()
            del x
        peaks.append(region.peak_increase_bytes)
    assert peaks[1] < 0.7 * peaks[0]


def test_model_can_move_and_change_its_dtype_repeatedly(device):
    """The parameters stay on the device."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device)
    model(torch.ones(4, 8, device=device))
    model.to(device).half().float().to(device)
    assert {one.device for one in model.parameters()} == {device}


def test_tensors_of_threads_are_counted(cka_memory, device):
    """The threads need not enter a dispatch mode."""
    kept = []
    with cka_memory.measure() as region:
        threads = [
            threading.Thread(target=lambda: kept.append(filled(MB, device))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert region.retained_bytes == 4 * MB


def test_matrix_product_uses_a_workspace_while_it_runs(cka_memory, device):
    """The workspace has 8.125 MiB on this card, in addition to the result."""
    square = torch.ones(8, 8, device=device)
    with cka_memory.measure() as region:
        square @ square
    assert region.peak_increase_bytes == WORKSPACE + 512
    assert region.retained_bytes == 0


def test_leak_is_reported_with_its_line_and_holder(cka_memory, device):
    """The report is the same as on a real device."""
    held = {}
    with cka_memory.measure() as region:
        held["here"] = filled(MB, device)
    (group,) = region.retained
    assert group.bytes == MB
    assert "on_prediction.py" in group.created_at[0]
    assert "held['here']" in group.held_by


def test_full_card_raises_out_of_memory_error():
    """The error is raised at the first byte above what the allocator can reserve."""
    probe = MemoryProbe("predict:cuda:a100-40gb")
    most = int(39.5 * 2**30) - 2**29
    with probe.measure() as region:
        kept = filled(most, probe.device)
        with pytest.raises(torch.OutOfMemoryError, match=r"Predicted: CUDA out of memory.*A100 40"):
            filled(1, probe.device)
    assert region.retained_bytes == kept.nbytes
    del kept
    filled(most, probe.device)
    with pytest.raises(torch.OutOfMemoryError):
        filled(most + 1, probe.device)


def test_cards_do_not_share_memory(cka_memory, device):
    """Each card has one meter, which all of its names refer to."""
    other = MemoryProbe("predict:cuda:h100")
    assert other.device != device
    with cka_memory.measure() as here, other.measure() as there:
        filled(MB, other.device)
    assert (here.peak_increase_bytes, there.peak_increase_bytes) == (0, MB)
    assert meter_for("predict:cuda") is meter_for("predict:cuda:a100") is cka_memory.meter


def test_predicted_device_is_never_selected_automatically():
    """Torch does not report the predicted device as an available accelerator either."""
    assert MemoryProbe().device.type != "predicted"
    assert not torch.accelerator.is_available() or torch.cuda.is_available()


@pytest.mark.zero_retention
def test_cka_runs_on_a_predicted_device(cka_memory):
    """CKA reads no value during the computation; its result has a shape."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(cka_memory.device)
    loader = [torch.randn(64, 16) for _ in range(6)]
    for kernel in ("linear", "rbf"):
        with (
            cka_memory.measure(kernel) as region,
            CKA(model, device=cka_memory.device, kernel=kernel) as cka,
        ):
            shape = cka.compare(region.batches(loader), progress=False).matrix.shape
        assert shape == (3, 3)
        assert region.growth_mb_per_batch == 0
