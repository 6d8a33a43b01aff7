"""torch's profiler with ``ProfilerActivity.CUDA``: it has what the device was asked to do."""

import json

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import emulated_cuda
emulated_cuda.load("a100")
import torch
from torch.profiler import ProfilerActivity, profile
layer = torch.nn.Linear(8, 8, device="cuda")
batch = torch.ones(64, 8)
torch.cuda.synchronize()
both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=both) as profiled:
    total = layer(batch.cuda()).relu().sum()
    torch.cuda.synchronize()
    total.item()
of_device = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
of_operators = {e.name: [k.name for k in e.kernels] for e in profiled.events() if e.kernels}
path = sys.argv[1]
profiled.export_chrome_trace(path)
with open(path) as file:
    trace = json.load(file)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.ones(4, device="cuda")
with profile(activities=[ProfilerActivity.CUDA]) as alone:
    graph.replay()
print(json.dumps({
    "device": [e.name for e in of_device],
    "times": [e.device_time_total for e in of_device],
    "operators": of_operators,
    "copies": [e["args"]["bytes"] for e in trace["traceEvents"] if e.get("cat") == "gpu_memcpy"],
    "calls": [e["name"] for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"],
    "label": trace.get("emulated_cuda"),
    "table": profiled.key_averages().table(sort_by="cuda_time_total"),
    "replay": [e.name for e in alone.events()],
}))
"""


@pytest.fixture(scope="module")
def run(python, tmp_path_factory):
    """Return the process that profiles a small network."""
    path = tmp_path_factory.mktemp("profile") / "trace.json"
    return python("-c", PROGRAM, str(path))  # kernels register their names when torch is loaded


@pytest.fixture(scope="module")
def profiled(run):
    """Return what the process found in the profile."""
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_kernels_and_copies_of_the_device_are_events(profiled):
    """Each kernel and copy is an event of the device, in order, with a time that is not zero."""
    names = profiled["device"]
    assert names[0] == "Memcpy HtoD (Pageable -> Device)"
    assert names[-1].startswith("Memcpy DtoH (Device -> ")
    assert "cublasLtMatmul" in names
    assert sum("reduce_kernel" in name for name in names) == 1
    assert min(profiled["times"]) > 0


def test_operators_know_their_kernels(profiled):
    """The operator that launched a kernel or a copy has it among its kernels."""
    operators = profiled["operators"]
    assert operators["aten::copy_"] == ["Memcpy HtoD (Pageable -> Device)"]
    assert operators["aten::addmm"] == ["cublasLtMatmul"]
    assert len(operators["aten::sum"]) == 1
    assert "reduce_kernel" in operators["aten::sum"][0]


def test_trace_has_the_bytes_of_copies_and_the_calls_of_the_runtime(profiled):
    """An exported trace has the size of each copy and the runtime's calls that started them."""
    assert profiled["copies"] == [64 * 8 * 4, 4]
    calls = profiled["calls"]
    assert {"cudaMemcpyAsync", "cudaLaunchKernel", "cudaDeviceSynchronize"} <= set(calls)


def test_table_and_trace_say_that_times_are_not_a_cards(profiled):
    """The table and the trace have a line that says what the times are."""
    label = "emulated: device times are not known (the times shown are those of calls on the host)"
    assert profiled["label"] == label
    assert profiled["table"].endswith(f"{label}\n")


def test_replay_of_a_graph_is_one_event(profiled):
    """A replay of a CUDA graph is an event; what was captured is none."""
    assert profiled["replay"].count("a CUDA graph") == 1
    assert not any("elementwise" in name for name in profiled["replay"])


def test_profiler_warns_of_nothing(run):
    """Torch's profiler finds CUPTI, so it does not warn that the device's events are missing."""
    assert "CUPTI" not in run.stderr
