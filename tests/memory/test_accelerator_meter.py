"""The accelerator's meter over a scripted allocator; real ones are tested in ``tests/gpu``."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_cka_memory import DeviceError, MemoryProbe
from pytest_cka_memory.meters import check_device_name, meter_for
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.base import Reading
from pytest_cka_memory.meters.ledger.dispatch import StorageWatch

BLOCK = 512


class Allocator:
    """What ``torch.accelerator`` would answer: blocks of 512 bytes, a reserve, a workspace."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.workspace = 0
        self.freed_by_sync = 0
        self.counts_requested = True
        self.has_peaks = True
        self.reserved = 0
        self.peak = self.peak_reserved = 0

    def allocate(self, size: int) -> None:
        self.sizes.append(size)
        self._rise()

    def free(self, size: int) -> None:
        self.sizes.remove(size)

    def use_workspace(self, size: int) -> None:
        self.workspace = size
        self._rise()

    def level(self) -> int:
        return sum(-(-size // BLOCK) * BLOCK for size in [*self.sizes, self.workspace])

    def stats(self, device: torch.device) -> dict[str, int]:
        stats = {
            "allocated_bytes.all.current": self.level(),
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "requested_bytes.all.current": sum(self.sizes) + self.workspace,
            "requested_bytes.all.allocated": 1,
        }
        if self.has_peaks:
            stats["allocated_bytes.all.peak"] = self.peak
        if not self.counts_requested:
            stats["requested_bytes.all.current"] = stats["requested_bytes.all.allocated"] = 0
        return stats

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")
        if self.freed_by_sync:
            self.free(self.freed_by_sync)
            self.freed_by_sync = 0

    def drop_workspaces(self) -> None:
        self.calls.append("drop workspaces")
        self.workspace = 0

    def empty_cache(self) -> None:
        self.calls.append("empty cache")
        self.reserved = self.level()

    def reset_peaks(self, device: torch.device) -> None:
        self.peak, self.peak_reserved = self.level(), self.reserved

    def _rise(self) -> None:
        self.peak = max(self.peak, self.level())
        self.reserved = max(self.reserved, self.level())
        self.peak_reserved = max(self.peak_reserved, self.reserved)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """In the place of torch's own, for ``cuda``."""
    made = Allocator()
    for name, function in {
        "memory_stats": made.stats,
        "synchronize": made.synchronize,
        "empty_cache": made.empty_cache,
        "reset_peak_memory_stats": made.reset_peaks,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **kw: empty(*size, **kw))
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", made.drop_workspaces, raising=False
    )
    cuda = SimpleNamespace(get_device_name=lambda index: f"Scripted {index}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    return made


@pytest.fixture
def gpu(allocator: Allocator) -> AcceleratorMeter:
    """Its counters are scripted; the tensors it sees are those of the CPU."""
    meter = AcceleratorMeter("cuda", 1)
    meter._watch = StorageWatch(torch.device("cpu"))
    return meter


def test_the_meter_names_device_and_allocator(gpu: AcceleratorMeter) -> None:
    """Reports say what was measured, and by what."""
    assert (gpu.device, gpu.device_name) == ("cuda:1", "Scripted 1")
    assert gpu.name == "PyTorch's caching allocator"


def test_a_reading_has_blocks_and_bytes_asked_for(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """Leaks are judged on the latter: 4 bytes are 4, not a block of 512."""
    allocator.allocate(4)
    allocator.allocate(600)
    assert gpu.read() == Reading(
        allocated_bytes=512 + 1024,
        requested_bytes=604,
        peak_bytes=512 + 1024,
        reserved_bytes=512 + 1024,
        peak_reserved_bytes=512 + 1024,
    )


def test_cleaning_is_in_the_order_that_frees_all(
    gpu: AcceleratorMeter, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels hold tensors, cycles hold tensors, workspaces hold blocks; the cache comes last."""
    import gc

    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: allocator.calls.append("collect") or collect())
    gpu.clean()
    assert allocator.calls == ["synchronize", "collect", "drop workspaces", "empty cache"]


def test_workspaces_are_dropped_and_told(gpu: AcceleratorMeter, allocator: Allocator) -> None:
    """The seed's 9.12 MB 'retained' of its first run are these."""
    allocator.use_workspace(8_519_680)
    assert gpu.clean() == 8_519_680
    assert gpu.clean() == 0
    assert gpu.read().allocated_bytes == 0


def test_what_a_running_kernel_held_is_no_workspace(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """It is freed by the synchronisation, before workspaces are weighed."""
    allocator.allocate(100)
    allocator.freed_by_sync = 100
    allocator.use_workspace(5)
    assert gpu.clean() == 5


def test_a_torch_without_the_private_name_tells_nothing(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the workspaces could not be told apart."""
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    meter = AcceleratorMeter("cuda", 0)
    assert meter.clean() is None
    assert "drop workspaces" not in allocator.calls


def test_only_cuda_has_cublas(allocator: Allocator) -> None:
    """Another accelerator's cleaning must not start CUDA."""
    assert AcceleratorMeter("xpu", 0).clean() is None
    assert "drop workspaces" not in allocator.calls


@pytest.mark.parametrize(
    ("freed", "asked", "born", "retained"),
    [
        pytest.param(0, 0, 0, 0, id="nothing"),
        pytest.param(0, 400, 100, 400, id="tensor"),
        pytest.param(0, 400, 0, 400, id="no-tensor-owns-it"),
        pytest.param(400, 400, 100, 400, id="old-tensor-freed-hides-a-leak"),
        pytest.param(400, 0, 0, 0, id="only-freed"),
        pytest.param(400, 900, 100, 500, id="rise-above-the-births"),
    ],
)
def test_retained_is_the_rise_or_the_births_whichever_is_more(
    gpu: AcceleratorMeter,
    allocator: Allocator,
    freed: int,
    asked: int,
    born: int,
    retained: int,
) -> None:
    """Neither alone sees everything: `born` floats are born and kept."""
    allocator.allocate(400)
    gpu.start()
    mark = gpu.mark()
    if freed:
        allocator.free(freed)
    if asked:
        allocator.allocate(asked)
    kept = torch.zeros(born)
    assert gpu.retained_since(mark) == retained
    gpu.stop()
    del kept


def test_without_bytes_asked_for_whole_blocks_are_judged(allocator: Allocator) -> None:
    """As under cudaMallocAsync; the meter's name says so in every report."""
    allocator.counts_requested = False
    meter = AcceleratorMeter("cuda", 0)
    assert meter.name == "PyTorch's caching allocator, whole blocks only"
    allocator.allocate(4)
    assert meter.read().requested_bytes == 512


def test_an_allocator_without_peaks_is_refused(allocator: Allocator) -> None:
    """Some backends keep no counters; a zero from them is no figure."""
    allocator.has_peaks = False
    with pytest.raises(
        DeviceError, match=r"cuda:0 keeps no peak counters in torch .*; write --cka-memory-device="
    ):
        AcceleratorMeter("cuda", 0)


def test_a_device_that_cannot_be_used_is_refused(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own reason."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(DeviceError, match="cuda:0 cannot be measured: out of memory"):
        AcceleratorMeter("cuda", 0)


def test_a_whole_region_on_the_scripted_gpu(gpu: AcceleratorMeter, allocator: Allocator) -> None:
    """Blocks at the start and the peak, bytes asked for in retained and growth, one-time apart."""
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
    assert region.reserved_end_bytes == region.end_bytes


def test_nested_regions_on_the_scripted_gpu(gpu: AcceleratorMeter, allocator: Allocator) -> None:
    """The device's one peak counter is reset by the inner region."""
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
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    """Without asking torch."""
    with pytest.raises(DeviceError, match=r"^unknown device '.*'; write one of auto, cpu, cuda,"):
        check_device_name(name)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:11", "xpu:0", "mps"])
def test_a_known_device_is_let_through(name: str) -> None:
    """Whether this machine has it is another question."""
    assert check_device_name(name) == name


def test_the_type_that_torch_has_found_is_known_too() -> None:
    """A backend from outside torch has a name of its own; another's is still refused."""
    assert check_device_name("abacus:1", found="abacus") == "abacus:1"
    with pytest.raises(DeviceError, match="unknown device 'abaci'"):
        check_device_name("abaci", found="abacus")


@pytest.mark.parametrize("ask", [meter_for, MemoryProbe], ids=["meter", "probe"])
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "xpu"])
def test_a_missing_device_is_an_error_never_a_zero(
    ask: Callable[[str], object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.cuda.memory_allocated()`` returns 0 where there is no CUDA."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(
        DeviceError,
        match=rf"device '{name}' is not there: torch .* finds no accelerator on this machine; ",
    ):
        ask(name)


def test_another_accelerator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that people see what they could write."""
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    with pytest.raises(DeviceError, match=r"device 'cuda' is not there: .* finds only xpu on this"):
        meter_for("cuda")


def test_an_index_too_high_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number there are."""
    found = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="device 'cuda:2' is not there: torch finds 2, counted"):
        meter_for("cuda:2")


def test_the_cpu_has_one_meter_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are reset globally, so nested regions must share it; auto falls back to it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert meter_for("cpu") is meter_for("auto") is meter_for()
    assert MemoryProbe().device == MemoryProbe(torch.device("cpu")).device == torch.device("cpu")


class History:
    """What ``torch.cuda.memory`` would answer: blocks by address, one of them a tensor's."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.blocks: list[dict[str, object]] = []

    def allocate(self, address: int, size: int, *frames: tuple[str, int, str]) -> None:
        self.allocator.allocate(size)
        told = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
        block = {"address": address, "size": BLOCK, "requested_size": size, "frames": told}
        self.blocks.append({**block, "state": "active_allocated"})

    def record(self, **options: object) -> None:
        """Recording is on from the start."""

    def dump(self, path: str) -> None:
        """No file is asked for here."""

    def snapshot(self) -> dict[str, object]:
        inactive = {"address": 7, "size": BLOCK, "state": "inactive"}
        elsewhere = {"device": 0, "blocks": [{**self.blocks[0], "address": 8}]}
        return {"segments": [elsewhere, {"device": 1, "blocks": [*self.blocks, inactive]}]}


def test_blocks_that_no_tensor_owns_are_told_by_the_line_that_allocated_them(
    gpu: AcceleratorMeter, allocator: Allocator
) -> None:
    """From the allocator's history, where that is recorded: tensors and old blocks left out."""
    gpu._history = history = History(allocator)
    assert gpu.record_history()
    history.allocate(1, 100, ("/home/me/old.py", 1, "before"))
    tensor = None
    with MemoryProbe(meter=gpu, explainer=_All()).measure() as region:
        tensor = torch.zeros(25)
        history.allocate(tensor.data_ptr(), tensor.nbytes, ("/home/me/net.py", 2, "forward"))
        inside = ("linear.cpp", 3, "at::linear"), ("/home/me/net.py", 4, "forward")
        history.allocate(2, 300, *inside)
        history.allocate(3, 200)
    by_bytes = {holding.bytes: holding for holding in region.retained}
    assert sorted(by_bytes) == [100, 200, 300]
    assert by_bytes[100].operator == "aten.zeros"
    assert by_bytes[300].created_at == ("me/net.py:4 in forward",)
    assert "--cka-memory-snapshots=DIR records where" in by_bytes[200].hint


def test_an_allocator_that_keeps_no_history_says_so(gpu: AcceleratorMeter, tmp_path: Path) -> None:
    """So that no snapshot is promised, and none is written."""
    assert not gpu.record_history()
    assert not gpu.dump_history(tmp_path / "snapshot.pickle")
    assert list(tmp_path.iterdir()) == []


class _All:
    """Asks for everything to be explained."""

    def wanted(self, record: object) -> set[str]:
        return {"retained_bytes"}

    def named(self) -> dict[str, object]:
        return {}
