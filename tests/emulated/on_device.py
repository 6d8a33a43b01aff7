"""Tests on two emulated cards of 4 GB each, without values.

``test_on_device.py`` runs them in a new process.
"""

import emulated_cuda

MB = 2**20
TOTAL = 4096 * MB
CONTEXT = 512 * MB
emulated_cuda.load("a100", devices=2, total_bytes=TOTAL, values=False)

import ctypes  # noqa: E402
import gc  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812


@pytest.fixture(autouse=True)
def empty_devices(imports_excluded_from_collection):
    """Start and end each test without memory of earlier ones."""
    torch.cuda.set_device(0)
    for clear in (gc.collect, torch.cuda.empty_cache, torch.cuda.reset_peak_memory_stats):
        clear()
    yield
    torch.cuda.set_device(0)


def filled(size: int, device: str = "cuda") -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


# ---- Devices ----


def test_card_has_the_name_and_properties_of_the_real_one():
    """The emulated card has the name and properties of the real one, by which torch chooses
    algorithms.
    """
    found = torch.cuda.get_device_properties(0)
    assert found.name == torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB"
    assert (found.major, found.minor, found.multi_processor_count) == (8, 0, 108)
    assert found.total_memory == TOTAL
    assert found.L2_cache_size == 40 * MB
    assert found.warp_size == 32
    assert found.max_threads_per_multi_processor == 2048
    assert found.shared_memory_per_block_optin == 163 * 1024
    assert torch.cuda.get_device_capability() == (8, 0)


def test_process_has_two_devices_with_memory_of_their_own():
    """Each of two devices has memory of its own: an allocation on
    one is not counted on the other.
    """
    assert torch.cuda.device_count() == 2
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    kept = filled(3 * MB, "cuda:1")
    assert torch.cuda.memory_allocated(0) == before[0]
    assert torch.cuda.memory_allocated(1) == before[1] + 3 * MB
    assert kept.to("cuda:0").device.index == 0
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == 1
    assert torch.cuda.can_device_access_peer(0, 1)


def test_device_that_does_not_exist_is_refused():
    """A device that does not exist is refused with the message of CUDA."""
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:2")


# ---- Memory ----


def test_copies_between_host_and_devices_keep_their_values():
    """What was copied to a device can be read back, copied on it and to the other device.

    Without values, that holds for pieces of up to 1 MB; larger ones leave zeros.
    """
    values = torch.arange(100_000)
    first = values.cuda()
    for copy in (first, first.clone(), first.to("cuda:1"), first.clone().to("cuda:1").clone()):
        assert torch.equal(copy.cpu(), values)


def test_copied_bytes_at_odd_addresses_keep_their_values():
    """A copy skips pages that nobody wrote, also if it begins within a page; values stay right."""
    large = torch.zeros(3 * MB, dtype=torch.uint8, device="cuda")
    large[MB + 5 : MB + 2005].copy_(torch.full((2000,), 7, dtype=torch.uint8))
    copied = torch.zeros(3 * MB, dtype=torch.uint8, device="cuda")
    copied[:1].copy_(torch.ones(1, dtype=torch.uint8))
    copied[1:].copy_(large[:-1])
    expected = torch.zeros(3 * MB, dtype=torch.uint8)
    expected[MB + 6 : MB + 2006] = 7
    expected[0] = 1
    assert torch.equal(copied.cpu(), expected)


def test_new_memory_takes_no_memory_of_the_machine():
    """New tensors take no memory of the machine: pages are committed when they are written."""
    before = resident_bytes()
    kept = [torch.ones(512 * MB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    kept.append(kept[0].clone())
    kept.append(torch.zeros(512 * MB, dtype=torch.uint8, device="cuda"))
    assert resident_bytes() - before < 64 * MB
    del kept


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def test_values_are_not_computed_and_small_reads_are_zero():
    """Without values, a number that a kernel would have written is read as 0."""
    assert torch.tensor(5.0).cuda().item() == 5.0
    assert (torch.full((1,), 5.0).cuda() + 1).item() == 0.0
    assert torch.ones(100, device="cuda").nonzero().shape == (0, 1)


def test_out_of_memory_is_raised_at_the_card_less_its_context_and_recovers():
    """The caching allocator gets the card's memory less that of the CUDA context."""
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"total capacity of 4\.00 GiB"):
        filled(TOTAL - CONTEXT + 1)
    largest = filled(TOTAL - CONTEXT)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"this process has 4\.00 GiB memory"):
        filled(1)
    assert filled(1, "cuda:1").device.index == 1
    del largest
    assert filled(TOTAL - CONTEXT).numel() == TOTAL - CONTEXT


def test_mem_get_info_counts_segments_and_the_context():
    """A freed tensor is free for the device only after the allocator's cache is emptied."""
    free, total = torch.cuda.mem_get_info()
    kept = filled(30 * MB)
    assert total == TOTAL
    assert torch.cuda.mem_get_info() == (free - 30 * MB, TOTAL)
    del kept
    assert torch.cuda.mem_get_info() == (free - 30 * MB, TOTAL)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (free, TOTAL)


def test_memory_fraction_limits_the_process():
    """``set_per_process_memory_fraction`` limits the emulated device by torch's own logic."""
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"1024\.00 MiB allowed"):
            filled(1025 * MB)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_memory_is_recognised():
    """Pinned memory is recognised, so that ``non_blocking`` copies and ``is_pinned`` work."""
    pinned = torch.arange(1000).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(3).is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), pinned)
    assert torch.empty(10, pin_memory=True).is_pinned()


def test_snapshot_and_history_show_allocations_with_their_frames():
    """Torch's own snapshots and history show the frames of allocations, as on a card."""
    torch.cuda.memory._record_memory_history(max_entries=100)
    kept = filled(3 * MB)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    mine = [block for block in blocks if block["address"] == kept.data_ptr()]
    assert [block["state"] for block in mine] == ["active_allocated"]
    assert any("on_device.py" in frame["filename"] for frame in mine[0]["frames"])
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions[-2:] == ["segment_alloc", "alloc"]


def test_memory_pool_of_the_user_has_its_own_segments():
    """``torch.cuda.MemPool`` allocates by cudaMalloc too, so it has segments of its own."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = filled(3 * MB)
    assert len(pool.snapshot()) == 1
    assert kept.numel() == 3 * MB


# ---- Streams and events ----


def test_streams_and_events_are_done_at_once():
    """Streams and events are done at once, because no kernel runs."""
    stream = torch.cuda.Stream(priority=-1)
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.ones(10, device="cuda")
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert (stream.query(), event.query(), stream.priority) == (True, True, -1)
    stream.synchronize()
    torch.cuda.synchronize()


def test_events_advance_by_the_work_between_them():
    """An event's time is the work before it, so times and cuDNN's choice of plan are repeatable."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ones = torch.ones(10, device="cuda")
    start.record()
    for _ in range(100):
        ones.add_(1)
    end.record()
    assert start.elapsed_time(end) == pytest.approx(1.0)


def test_recorded_stream_delays_the_reuse_of_a_block():
    """A block that another stream uses stays active until the allocator looks at the stream."""
    stream = torch.cuda.Stream()
    used = filled(3 * MB)
    used.record_stream(stream)
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    del used
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == active
    small = filled(1)
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == active - 3 * MB + 512
    del small


# ---- Operators ----


def test_training_runs_and_frees_what_it_allocated():
    """Convolutions, normalisation, products, reductions and an
    optimiser free what they allocated.
    """
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(16 * 15 * 15, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    levels = []
    for _ in range(3):
        loss = F.cross_entropy(
            model(torch.randn(8, 3, 32, 32, device="cuda")),
            torch.zeros(8, dtype=torch.long, device="cuda"),
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        levels.append(torch.cuda.memory_allocated())
    assert levels[1] == levels[2]


def test_convolution_takes_the_workspace_that_cudnn_plans():
    """The real cuDNN plans the workspace of a convolution from the card's properties."""
    image, weight = (
        torch.ones(64, 64, 32, 32, device="cuda"),
        torch.ones(64, 64, 3, 3, device="cuda"),
    )
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    result = F.conv2d(image, weight, padding=1)
    assert torch.cuda.max_memory_allocated() - start > result.nbytes


def test_product_takes_torchs_workspace():
    """For a product, torch itself allocates the workspace of cuBLAS: 8.125 MB on this card."""
    square = torch.ones(64, 64, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    result = square @ square
    assert torch.cuda.max_memory_allocated() - start == result.nbytes + 8 * MB + 128 * 1024


def test_autocast_allocates_half_precision():
    """Autocast chooses dtypes in the host's code, so it allocates half precision here too."""
    square = torch.ones(512, 512, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = square @ square
    assert result.dtype == torch.bfloat16
    assert result.untyped_storage().nbytes() == 512 * 512 * 2


def test_profiler_records_the_cpu_only():
    """The profiler records the CPU only, because there is no device to trace."""
    with torch.profiler.profile() as profile:
        torch.ones(10, device="cuda").add_(1)
    assert any(entry.key == "aten::add_" for entry in profile.key_averages())


def test_batches_of_worker_processes_are_pinned_and_copied():
    """A DataLoader with forked workers and ``pin_memory`` gives batches that can be copied."""
    data = [torch.full((10,), float(number)) for number in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)
    batches = [(batch.is_pinned(), batch.cuda(non_blocking=True).cpu()) for batch in loader]
    assert [pinned for pinned, _ in batches] == [True, True]
    assert torch.equal(torch.cat([batch for _, batch in batches]), torch.stack(data))


# ---- NVML ----


def test_nvml_counts_the_memory_that_the_process_uses():
    """Torch and pynvml load NVML by its name, and it counts the memory that the process uses."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    kept = filled(30 * MB)
    count, device, memory = ctypes.c_uint(), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    assert nvml.nvmlInit_v2() == nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    free, total = torch.cuda.mem_get_info()
    assert (count.value, *memory) == (2, total, free, total - free)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(device)) != 0
    assert torch.cuda._raw_device_count_nvml() == 2
    assert len(set(torch.cuda._raw_device_uuid_nvml())) == 2
    del kept


# ---- What is not supported ----


def test_graph_takes_the_memory_of_its_capture_and_is_replayed():
    """Without values too, a graph is captured, keeps its pool reserved, and is replayed."""
    values, before = filled(4 * MB), torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = values + 1
        total = values.sum()  # clears the counters of its blocks with a fill of the runtime
    allocated = torch.cuda.memory_allocated()
    graph.replay()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() > before
    del kept, total, graph


UNSUPPORTED = {
    "cudaIpcGetMemHandle": (
        "another process",
        lambda: torch.multiprocessing.reductions.reduce_tensor(torch.ones(1, device="cuda")),
    ),
    "cusolverDnSgesvdaStridedBatched_bufferSize": (
        "on the CPU",
        lambda: torch.linalg.svdvals(torch.eye(2, device="cuda"), driver="gesvda"),
    ),
    "cufftXtMakePlanMany": (
        "a length without large prime factors",
        lambda: torch.fft.rfft(torch.ones(8191, device="cuda")),
    ),
    "cusparseCreate": (
        "on the CPU",
        lambda: torch.eye(4).to_sparse().cuda() @ torch.ones(4, 4, device="cuda"),
    ),
}


@pytest.mark.parametrize("function", UNSUPPORTED)
def test_unsupported_call_raises_and_names_the_function(function):
    """The error of an unsupported call names it and says what to do, and the device still works."""
    advice, call = UNSUPPORTED[function]
    with pytest.raises(RuntimeError) as raised:
        call()
    assert f"{function} is not supported by the emulated device" in str(raised.value)
    assert advice in str(raised.value)
    before = torch.cuda.memory_allocated()
    assert filled(512).cpu().numel() == 512
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("function", ["cudaMallocManaged", "cudaGraphAddNode", "cuMulticastCreate"])
def test_unsupported_function_of_the_runtime_has_a_text_that_names_it(function):
    """Every unsupported function names itself in its error, also if torch never calls it here."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    code = getattr(library, function)()
    text = library.cudaGetErrorString(code).decode()
    assert code == 801
    assert text.startswith(f"{function} is not supported by the emulated device")
    library.cudaGetLastError()


def test_launch_that_a_card_would_refuse_fails():
    """A launch with too many threads or too much shared memory fails, as on a card."""
    library = ctypes.CDLL("libcuda.so.1")
    launch = library.cuLaunchKernel
    assert launch(None, 1, 1, 1, 1024, 1, 1, 0, None, None, None) == 0
    assert launch(None, 1, 1, 1, 1025, 1, 1, 0, None, None, None) == 9
    assert launch(None, 1, 1, 1, 32, 1, 1, 164 * 1024, None, None, None) == 9
    assert launch(None, 0, 1, 1, 32, 1, 1, 0, None, None, None) == 9
    library.cudaGetLastError()
