"""What a predicted A100 tells; collected by ``test_on_prediction.py``, in a process of its own.

A process can set up the device once, and never take it back.
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
from pytest_cka_memory.meters import meter_for

MB = 2**20
WORKSPACE = 8 * MB + 128 * 2**10


@pytest.fixture
def device(cka_memory):
    return cka_memory.device


def filled(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, device=device)


def test_tensors_take_blocks_and_give_them_back(cka_memory, device):
    """Requested to the byte, allocated in blocks, reserved in segments."""
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
def test_every_way_of_birth_counts_once(cka_memory, device, make):
    """A view is none of its own."""
    with cka_memory.measure() as region:
        kept = make(device)
    assert kept is not None
    assert region.retained_bytes == 1024


def test_work_on_the_cpu_stays_real(device):
    """A data loader's tensors have values, whatever is predicted beside them."""
    filled(10, device)
    assert torch.ones(3).sum().item() == 3.0
    assert bool((torch.arange(4) > 2).any())


def test_a_result_brought_home_has_a_shape_and_no_value(device):
    """So that nothing goes on with a value that was never computed."""
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
    "written-home": (lambda x: torch.ones(4).copy_(x), "writes a predicted .* on cpu"),
    "other-card": (lambda x: x.to("predicted:63"), "there is no such card"),
    "no-rule": (lambda x: unruled(x), "register_fake"),
    "autocast": (lambda x: halved(x), r"model\.bfloat16\(\)"),
}


@torch.library.custom_op("predicted_tests::unruled", mutates_args=())
def unruled(x: torch.Tensor) -> torch.Tensor:
    """An operator of someone's own, without a rule for its shapes."""
    return x.clone()


def halved(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return x @ x


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_predicted_is_refused_at_the_line_that_did_it(device, name):
    """With what it was, why, and what to write instead."""
    call, said = REFUSED[name]
    with pytest.raises(PredictionError, match=rf"on_prediction\.py:\d+ in .*{said}"):
        call(torch.ones(4, device=device))


def test_autocast_that_is_off_is_let_be(device):
    """As checkpoints and code written for any device turn it off where it was not on."""
    square = torch.ones(4, 4, device=device)
    with torch.autocast(device.type, enabled=False):
        assert (square @ square).dtype is torch.float32


def test_the_device_is_asked_like_any_other(device):
    """By code that is written for any: it waits for nothing, and is never taken by itself."""
    module = torch.get_device_module(device)
    module.synchronize()
    module.empty_cache()
    assert 0 <= device.index < module.device_count()
    assert not module.is_available()


def test_compiled_code_is_refused(device):
    """Unless it is told to run uncompiled."""
    double = torch.compile(lambda x: x * 2)
    with pytest.raises(Exception, match=r"on_prediction\.py:\d+ .*cannot predict torch\.compile"):
        double(torch.ones(4, device=device))
    with torch.compiler.set_stance("force_eager"):
        assert double(torch.ones(4, device=device)).shape == (4,)


def test_mistakes_stay_mistakes(device):
    """A second time too, when the answer might be known from the first."""
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.ones(3, 4, device=device) @ torch.ones(3, 4, device=device)
        with pytest.raises(RuntimeError):
            torch.ones(3, device=device).add_(torch.ones(4, device=device))


def test_answers_given_again_are_the_same(device):
    """Views and writes are answered from memory the second time."""
    shapes = []
    for _ in range(3):
        base = torch.zeros(4, 6, device=device)
        view = base[1:3].t()
        written = view.add_(1)
        shapes.append((view.shape, view.stride(), view.storage_offset(), written is view))
        assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert shapes == [(torch.Size([6, 2]), (1, 6), 6, True)] * 3


def test_a_training_step_counts_its_gradients(cka_memory, device):
    """Weights, gradients and the optimizer's moments: four times the weights are alive."""
    model = nn.Linear(256, 256, bias=False).to(device)
    with cka_memory.measure() as region:
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(8, 256, device=device)).sum().backward()
        optimizer.step()
    weights = 256 * 256 * 4
    assert 3 * weights <= region.retained_bytes < 3 * weights + 1024


def test_what_fails_in_a_backward_pass_fails_there(device):
    """A hook of the user's, and what cannot be predicted, come out as they are."""

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


def test_what_a_failed_backward_pass_held_is_not_retained(cka_memory, device, fail_late):
    """As on a card, torch's thread lets go of it later than its caller hears of it."""
    with cka_memory.measure() as region:
        fail_late(device)
    assert region.retained_bytes == 0
    assert region.peak_increase_bytes > 4000


def test_a_checkpoint_lets_go_of_what_it_computes_again(cka_memory, device):
    """So a deep network needs less memory with it than without."""
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


def test_models_move_as_often_as_they_like(device):
    """To the device again, to another dtype, home."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device)
    model(torch.ones(4, 8, device=device))
    model.to(device).half().float().to(device)
    assert {one.device for one in model.parameters()} == {device}


def test_threads_are_counted(cka_memory, device):
    """No mode has to be entered in them."""
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


def test_a_product_takes_a_workspace_as_long_as_it_runs(cka_memory, device):
    """8.125 MiB on this card, beside its result."""
    square = torch.ones(8, 8, device=device)
    with cka_memory.measure() as region:
        square @ square
    assert region.peak_increase_bytes == WORKSPACE + 512
    assert region.retained_bytes == 0


def test_a_leak_is_traced_to_its_line_and_holder(cka_memory, device):
    """As on a device that is there."""
    held = {}
    with cka_memory.measure() as region:
        held["here"] = filled(MB, device)
    (group,) = region.retained
    assert group.bytes == MB
    assert "on_prediction.py" in group.created_at[0]
    assert "held['here']" in group.held_by


def test_a_card_that_is_full_raises_as_torch_does():
    """Where it would: at the first byte above what its allocator can reserve."""
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
    """Each has its meter, and each name one."""
    other = MemoryProbe("predict:cuda:h100")
    assert other.device != device
    with cka_memory.measure() as here, other.measure() as there:
        filled(MB, other.device)
    assert (here.peak_increase_bytes, there.peak_increase_bytes) == (0, MB)
    assert meter_for("predict:cuda") is meter_for("predict:cuda:a100") is cka_memory.meter


def test_a_prediction_is_never_the_automatic_choice():
    """Nor does torch take the device for an accelerator that is there."""
    assert MemoryProbe().device.type != "predicted"
    assert not torch.accelerator.is_available() or torch.cuda.is_available()


@pytest.mark.zero_retention
def test_cka_is_predicted_unchanged(cka_memory):
    """No value is looked at before the result, which has a shape."""
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
