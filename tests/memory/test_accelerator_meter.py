"""The accelerator meter on a scripted allocator, which cannot be counted natively.

``tests/gpu`` tests it on real and emulated devices.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_allocator import Allocator

from pytest_cka_memory import DeviceError, MemoryProbe
from pytest_cka_memory.meters.accelerator.by_storages import TensorMeter
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.base import Reading
from pytest_cka_memory.meters.selection import (
    _accelerator_meter,
    accelerator_meter,
    check_device_name,
    meter_for,
)


def test_meter_names_its_device_and_allocator(gpu: AcceleratorMeter) -> None:
    """Reports show the names of the device and of its allocator."""
    assert (gpu.device, gpu.device_name) == ("cuda:1", "Scripted 1")
    assert gpu.name == "PyTorch's caching allocator"


def test_reading_has_block_bytes_and_requested_bytes(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """Leaks are judged by requested bytes: 4 bytes count as 4, not as a block of 512."""
    allocator.allocate(4)
    allocator.allocate(600)
    assert gpu.read() == Reading(
        allocated_bytes=512 + 1024,
        requested_bytes=604,
        peak_bytes=512 + 1024,
        reserved_bytes=512 + 1024,
        peak_reserved_bytes=512 + 1024,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_has_no_figures_of_its_own_on_the_cpu_or_beside_a_ledger(
    gpu: AcceleratorMeter, device: str
) -> None:
    """The CPU has no separate figures of the host, nor has an accelerator whose tensors are
    counted.
    """
    kept = []
    with MemoryProbe(meter=gpu if device == "cuda" else meter_for("cpu")).measure() as region:
        kept.append(torch.ones(10))
    assert (region.retained_bytes, region.host_retained_bytes) == (40, None)
    assert region.host_retained == ()


def test_clean_empties_the_cache_last(
    gpu: AcceleratorMeter, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is emptied last because kernels, reference cycles and workspaces hold blocks."""
    import gc

    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: allocator.calls.append("collect") or collect())
    gpu.clean()
    assert allocator.calls == ["synchronize", "drop workspaces", "collect", "empty cache"]


def test_clean_drops_workspaces_and_returns_their_bytes(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """A workspace of the first run must not count as retained, so cleaning drops and reports it."""
    allocator.use_workspace(8_519_680)
    assert gpu.clean() == 8_519_680
    assert gpu.clean() == 0
    assert gpu.read().allocated_bytes == 0


def test_clean_does_not_count_tensors_of_a_running_kernel_as_workspaces(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """Synchronizing frees the tensors of a running kernel before workspaces are measured."""
    allocator.allocate(100)
    allocator.freed_by_sync = 100
    allocator.use_workspace(5)
    assert gpu.clean() == 5


def test_clean_returns_none_if_torch_cannot_drop_workspaces(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clean` returns None if torch has no function to drop workspaces."""
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    meter = accelerator_meter("cuda", 0)
    assert meter.clean() is None
    assert "drop workspaces" not in allocator.calls


def test_clean_drops_cublas_workspaces_only_on_cuda(allocator: Allocator) -> None:
    """Cleaning another accelerator must not initialize CUDA."""
    assert accelerator_meter("xpu", 0).clean() is None
    assert "drop workspaces" not in allocator.calls


@pytest.mark.parametrize(
    ("freed", "requested", "new_floats", "retained"),
    [
        pytest.param(0, 0, 0, 0, id="nothing"),
        pytest.param(0, 400, 100, 400, id="tensor"),
        pytest.param(0, 400, 0, 400, id="no-tensor-owns-it"),
        pytest.param(400, 400, 100, 400, id="old-tensor-freed-hides-a-leak"),
        pytest.param(400, 0, 0, 0, id="only-freed"),
        pytest.param(400, 900, 100, 500, id="rise-above-the-new-tensors"),
    ],
)
def test_retained_is_the_new_live_tensors_and_what_the_allocator_rose_beyond_them(
    gpu: AcceleratorMeter,
    allocator: Allocator,
    freed: int,
    requested: int,
    new_floats: int,
    retained: int,
) -> None:
    """A rise misses a leak if old tensors are freed, and live tensors miss other blocks; both
    count.
    """
    allocator.allocate(400)
    gpu.start()
    mark = gpu.mark()
    if freed:
        allocator.free(freed)
    if requested:
        allocator.allocate(requested)
    kept = torch.zeros(new_floats)
    assert gpu.retained_since(mark) == retained
    gpu.stop()
    del kept


def test_old_tensor_that_is_freed_does_not_hide_a_block_that_no_tensor_owns(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """A new block without a tensor is retained, although an old
    tensor's size was freed meanwhile.
    """
    old = [torch.zeros(100)]
    allocator.allocate(400)
    gpu.start()
    mark = gpu.mark()
    old.clear()
    allocator.free(400)
    allocator.allocate(400)
    assert gpu.retained_since(mark) == 400
    gpu.stop()


def test_block_bytes_are_used_if_the_allocator_counts_no_requested_bytes(
    allocator: Allocator,
) -> None:
    """With cudaMallocAsync torch counts no requested bytes; the meter's name says so in reports."""
    allocator.counts_requested = False
    meter = accelerator_meter("cuda", 0)
    assert meter.name == "PyTorch's caching allocator, whole blocks only"
    allocator.allocate(4)
    assert meter.read().requested_bytes == 512


class TestWithoutCounters:
    """Tensors are counted on a device whose allocator counts nothing: a Mac's, other backends'."""

    @pytest.fixture
    def found(self, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch find a device of a Mac's type."""
        mps = torch.device("mps")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: mps)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    @pytest.mark.parametrize("missing", ["no-peaks", "zeros", "not-implemented"])
    def test_its_tensors_are_counted_and_the_notes_say_why(
        self,
        found: None,
        allocator: Allocator,
        monkeypatch: pytest.MonkeyPatch,
        missing: str,
    ) -> None:
        """If a backend's counters are absent, always zero or raise, tensors are counted; a note
        says why.
        """

        def stats(device: torch.device) -> dict[str, int]:
            if missing == "not-implemented":
                raise NotImplementedError("no stats")
            return {"allocated_bytes.all.peak": 0} if missing == "zeros" else {}

        monkeypatch.setattr(torch.accelerator, "memory_stats", stats)
        _accelerator_meter.cache_clear()
        meter = meter_for("auto")
        _accelerator_meter.cache_clear()
        assert meter.name == "tensors counted, allocator not seen"
        assert (meter.device, meter.device_name) == ("mps:0", "Scripted 0")
        assert meter.notes[0].startswith("mps:0 has no memory counters in torch ")
        assert any("(a lower bound)" in note for note in meter.notes)

    def test_peaks_that_cannot_be_reset_are_not_used(
        self, found: None, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Peaks that cannot be reset are not used, because they are the highest of the whole
        process.
        """

        def fail(device: torch.device) -> None:
            raise RuntimeError("not implemented")

        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", fail)
        _accelerator_meter.cache_clear()
        meter = meter_for("mps")
        _accelerator_meter.cache_clear()
        assert isinstance(meter, TensorMeter)
        assert " cannot reset the peak memory statistics of mps:0; use another" in meter.notes[0]

    def test_running_kernels_end_before_a_region_begins(self, allocator: Allocator) -> None:
        """A region begins after running kernels have ended,
        because they hold tensors until then.
        """
        TensorMeter(torch.device("cpu", 0), "no counters").clean()
        assert allocator.calls == ["synchronize"]


def test_unusable_device_is_refused(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a device that cannot be used quotes torch's reason."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(DeviceError, match="cuda:0 cannot be measured: out of memory"):
        accelerator_meter("cuda", 0)


def test_region_figures_on_a_scripted_gpu(gpu: AcceleratorMeter, allocator: Allocator) -> None:
    """Start and peak count blocks; retained and growth count requested bytes.

    The workspace is reported as one-time bytes.
    """
    allocator.allocate(1000)
    with MemoryProbe(meter=gpu).measure("fit") as region:
        allocator.use_workspace(4096)
        for _ in range(9):
            allocator.allocate(50_000)
            allocator.free(50_000)
            allocator.allocate(4)
            region.batch_done(64)
    assert region.growth_bytes_per_batch == 4.0
    assert (region.retained_bytes, region.one_time_bytes) == (36, 4096)
    assert (region.start_bytes, region.end_bytes) == (1024, 1024 + 9 * 512)
    assert region.peak_bytes == 1024 + 4096 + 8 * 512 + 50_176
    assert region.reserved_peak_bytes == region.peak_bytes
    assert region.reserved_end_bytes == region.peak_bytes
    assert region.reserved_after_cleaning_bytes == region.end_bytes


def test_outer_region_keeps_its_peak_when_an_inner_region_resets_the_counter(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """An inner region resets the only peak counter of the device; the outer one keeps its peak."""
    probe = MemoryProbe(meter=gpu)
    with probe.measure() as outer:
        allocator.allocate(10_240)
        allocator.free(10_240)
        with probe.measure() as inner:
            allocator.allocate(1024)
            allocator.free(1024)
    assert (outer.peak_bytes, inner.peak_bytes) == (10_240, 1024)


@pytest.mark.parametrize(
    "name",
    ["gpu", "cuda:", "cuda:x", "cuda:-1", "auto:0", "", "cpu:x", "CUDA", "cuda:0:1", " cpu"],
)
def test_unknown_device_error_lists_the_known_devices(name: str) -> None:
    """The error for an unknown device lists the known ones without asking torch."""
    with pytest.raises(DeviceError, match=r"^unknown device '.*'; write one of auto, cpu, cuda,"):
        check_device_name(name)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:11", "xpu:0", "mps"])
def test_known_device_name_is_accepted(name: str) -> None:
    """A known device name is accepted on every machine, whatever devices it has."""
    assert check_device_name(name) == name


def test_device_type_of_an_external_backend_is_accepted() -> None:
    """An external backend has its own device type; unknown types are still refused."""
    assert check_device_name("abacus:1", available="abacus") == "abacus:1"
    with pytest.raises(DeviceError, match="unknown device 'abaci'"):
        check_device_name("abaci", available="abacus")


@pytest.mark.parametrize("ask", [meter_for, MemoryProbe], ids=["meter", "probe"])
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "xpu"])
def test_unavailable_device_is_an_error(
    ask: Callable[[str], object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unavailable device is an error: ``torch.cuda.memory_allocated()`` would return 0."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(
        DeviceError,
        match=rf"device '{name}' is not available: torch .* found no accelerator on this machine; ",
    ):
        ask(name)


@pytest.mark.parametrize(("build", "named"), [("13.0", True), (None, False)])
def test_unavailable_cuda_device_error_names_the_emulated_device_if_it_can_run(
    build: str | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA the error names the emulated device, which needs torch's CUDA build on Linux."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(DeviceError, match="write cpu, or auto to use what is available") as error:
        meter_for("cuda")
    assert ("or emulate:cuda to run CUDA code without a GPU" in str(error.value)) is named


def test_unavailable_device_error_names_the_available_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error for an unavailable device names the accelerator that is available."""
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    with pytest.raises(
        DeviceError, match=r"device 'cuda' is not available: .* found only xpu on this"
    ):
        meter_for("cuda")


def test_device_index_beyond_the_device_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index beyond the devices is refused, and the error says how many there are."""
    found = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="device 'cuda:2' is not available: torch found 2 device"):
        meter_for("cuda:2")


def test_process_has_one_cpu_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested regions share the one CPU meter of a process, because peaks are reset globally.

    Without an accelerator, ``auto`` is the CPU.
    """
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert meter_for("cpu") is meter_for("auto") is meter_for()
    assert MemoryProbe().device == MemoryProbe(torch.device("cpu")).device == torch.device("cpu")


def test_allocator_without_history_records_and_dumps_nothing(
    gpu: AcceleratorMeter, tmp_path: Path
) -> None:
    """Without a history the methods to record and dump return False, and no file is written."""
    assert not gpu.record_history()
    assert not gpu.dump_history(tmp_path / "snapshot.pickle")
    assert list(tmp_path.iterdir()) == []
