"""Tests of kernels that the user wrote, and of graphs: none is read in silence as if it had run.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from emulated_cuda.errors import StaleValueError
from emulated_cuda.values import staleness

# ---- Kernels ----


class Sizes(ctypes.Structure):
    """``dim3`` of CUDA."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def launch_from_host_code(values: torch.Tensor) -> None:
    """Call what host code that nvcc has compiled calls."""
    launch = ctypes.CDLL("libcuda.so.1").cudaLaunchKernel
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    launch.argtypes = (pointer, Sizes, Sizes, pointer, size, pointer)
    assert launch(1, Sizes(1, 1, 1), Sizes(8, 1, 1), None, 0, None) == 0


@pytest.mark.parametrize("way", ["compiled", "templated", "host"])
def test_kernel_of_the_user_is_noticed_and_named(way):
    """A user's kernel is noticed and named, if PyTorch compiles it or host code launches it."""
    if way == "compiled":
        source = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1; }'
        kernel = torch.cuda._compile_kernel(source, "add_one")
        launch, name = lambda x: kernel((1, 1, 1), (8, 1, 1), (x,)), "add_one"
    elif way == "templated":
        source = "template <typename T> T twice(T x) { return x * 2; }"
        launch, name = torch.cuda.jiterator._create_jit_fn(source), "twice"
    else:
        launch, name = launch_from_host_code, "a kernel whose name is not known"
    values = torch.ones(8, device="cuda")
    result = launch(values)
    for tensor in (values, *([] if result is None else [result])):
        with pytest.raises(StaleValueError, match=f"the kernel .*{name}.* was launched outside"):
            tensor.cpu()


def test_kernel_of_triton_is_noticed_and_named(tmp_path, monkeypatch):
    """A Triton kernel is compiled for the card and does not run, so it is noticed and named.

    Triton's interpreter would be wrong.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton_kernels import add_one

    values = torch.ones(8, device="cuda")
    add_one[(1,)](values, 8)
    with pytest.raises(
        StaleValueError, match=r"kernel add_one was .*; call operators of torch in its place, "
    ) as error:
        values.cpu()
    assert "TRITON_INTERPRET" not in str(error.value)


def test_values_that_inductor_copies_while_it_measures_kernels_stay_unknown():
    """Inductor may copy what a kernel changes to the host and back; it stays an unknown value."""
    pytest.importorskip("triton")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    values = torch.ones(8, device="cuda")
    torch.cuda._compile_kernel('extern "C" __global__ void change(float* x) {}', "change")(
        (1, 1, 1), (8, 1, 1), (values,)
    )
    function = SimpleNamespace(arg_names=["x"])
    tuner = SimpleNamespace(optimize_mem=True, mutated_arg_names=["x"], fn=function)
    torch.cuda.reset_peak_memory_stats()
    copies = CachingAutotuner.copy_args_to_cpu_if_needed(tuner, values)
    assert list(copies) == ["x"]
    CachingAutotuner.restore_args_from_cpu(tuner, copies)
    with pytest.raises(StaleValueError, match="the kernel change was launched outside"):
        values.cpu()


def test_host_code_of_the_user_that_copies_and_fills_is_computed():
    """``cudaMemcpy`` and ``cudaMemset`` in a user's host code are no kernels, so they run."""
    library = ctypes.CDLL("libcuda.so.1")
    values, host = torch.ones(4, device="cuda"), torch.arange(4.0)
    address = ctypes.c_void_p(values.data_ptr())
    assert library.cudaMemset(address, 0, ctypes.c_size_t(8)) == 0
    assert values.tolist() == [0, 0, 1, 1]
    source = ctypes.c_void_p(host.data_ptr())
    assert library.cudaMemcpy(address, source, ctypes.c_size_t(16), 1) == 0
    assert (values * 2).tolist() == [0, 2, 4, 6]


def test_kernel_that_only_waits_leaves_values_known():
    """A kernel that only waits, as tests of streams use it, leaves values known."""
    values = torch.ones(2, device="cuda")
    torch.cuda._sleep(10)
    assert values.tolist() == [1, 1]
    assert not staleness.is_possible()


# ---- Graphs ----


WAYS = ["graph", "nested", "capture", "callables", "reduce-overhead"]


def capture(way, graph):
    """Capture a graph in one of the ways that torch has."""
    values = torch.ones(2, 2, device="cuda")
    if way == "graph":
        with torch.cuda.graph(graph):
            values.mul_(2)
    elif way == "nested":
        with torch.cuda.graph(graph), torch.cuda.graph(torch.cuda.CUDAGraph()):
            values.mul_(2)
    elif way == "capture":
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
    elif way == "callables":
        torch.cuda.make_graphed_callables(nn.Linear(2, 2).cuda(), (values,))
    else:
        compiled = torch.compile(lambda values: values @ values + 1, mode=way)
        for _ in range(3):
            compiled(values)


@pytest.mark.parametrize("way", WAYS)
def test_graph_is_refused_by_name_when_it_is_captured(way):
    """A CUDA graph is refused by name when it is captured, and the device computes afterwards."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"cudaStreamBeginCapture .* leave out torch.cuda.g"):
        capture(way, graph)
    with pytest.raises(RuntimeError):
        graph.replay()
    staleness.forget()
    assert (torch.ones(2, device="cuda") * 2).tolist() == [2, 2]


@pytest.mark.parametrize("way", WAYS)
def test_refused_graph_leaves_generator_stream_and_allocator_as_they_were(way):
    """Torch changes state before a refused capture; generator,
    stream and allocator are as before.
    """
    own = torch.Generator(device="cuda").manual_seed(1)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(own)
    stream, drawn = torch.cuda.current_stream(), torch.cuda.default_generators[0].get_offset()
    with pytest.raises(RuntimeError, match="cudaStreamBeginCapture"):
        capture(way, graph)
    assert torch.cuda.current_stream() == stream
    if way in ("graph", "nested", "capture"):
        assert torch.cuda.default_generators[0].get_offset() == drawn
    staleness.forget()
    assert torch.randn(4, device="cuda", generator=own).isfinite().all()
    assert torch.randn(4, device="cuda").isfinite().all()
    assert nn.functional.dropout(torch.ones(4, device="cuda")).sum().item() in (0, 2, 4, 6, 8)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    large = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
