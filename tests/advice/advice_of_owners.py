"""Hints on what C++ code, compilers and libraries keep, where no name of Python leads."""

import atexit
import ctypes
import io
import time
import warnings

import pytest
import torch
from advice_table import CARD, CLEANUP, CPU, KEEP, NATIVE, TENSORS, advice, follows
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.torch_versions import KEEPS_WORKSPACES

FIND_OUT = (
    "to find the owner, put cka_memory.measure() around one half of the block, then around "
    "one half of that, until one line is left: this line uses the owner"
)
OF_A_GRAPH = "an autograd graph of which no Python object has the result"
if not torch_private.SHOWS_SAVED:
    OF_A_GRAPH += ", or a hook of saved_tensors_hooks that returns the tensor itself"
CUBLAS = (
    "if the memory is a workspace of cuBLAS, which is kept for the next matrix product, call "
    "torch._C._cuda_clearCublasWorkspaces(); "
    if KEEPS_WORKSPACES
    else ""
)


def weight_on(device):
    return nn.Parameter(torch.ones(250, device=device))


def scaled(x):
    return x * torch.ones(250) + 1


@advice(
    "delete the function that torch.jit has compiled, or call its "
    "_debug_flush_compilation_cache(); until then torch.jit keeps the optimized code with "
    "its constants",
    devices=(CPU,),
)
def optimized_script(cka_memory):
    x = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append(torch.jit.script(scaled))
        for _ in range(3):
            KEEP[0](x)


@follows(optimized_script)
def optimized_script_deleted(cka_memory):
    x = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append(torch.jit.script(scaled))
        for _ in range(3):
            KEEP[0](x)
        del KEEP[0]


@follows(optimized_script)
def optimized_script_flushed(cka_memory):
    x = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append(torch.jit.script(scaled))
        for _ in range(3):
            KEEP[0](x)
        KEEP[0]._debug_flush_compilation_cache()


def saved_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(nn.Linear(5, 50)), file)
        return file.getvalue()


@advice(
    "delete the ScriptModule; it keeps the debug information of the file that torch.jit.load has "
    "read",
    devices=(CPU,),
    skip=NATIVE,
)
def loaded_script(cka_memory):
    file = io.BytesIO(saved_module())
    with cka_memory.measure():
        KEEP.append(torch.jit.load(file))


@follows(loaded_script)
def loaded_script_deleted(cka_memory):
    file = io.BytesIO(saved_module())
    with cka_memory.measure():
        KEEP.append(torch.jit.load(file))
        KEEP.clear()


def quantized(engine, layer):
    """Return a layer with weights of 8 bits, which a library keeps in its own layout."""
    from torch.ao import quantization

    before = torch.backends.quantized.engine
    CLEANUP.callback(setattr, torch.backends.quantized, "engine", before)
    torch.backends.quantized.engine = engine
    rule = quantization.default_dynamic_qconfig
    if type(layer) is nn.EmbeddingBag:
        rule = quantization.float_qparams_weight_only_qconfig
    layer.qconfig = rule
    return quantization.quantize_dynamic(nn.Sequential(layer), {type(layer): rule})[0]


QUANTIZES = "" if "fbgemm" in torch.backends.quantized.supported_engines else "requires fbgemm"


@advice(
    "delete the quantized module, and each container or hook that references it; it keeps "
    "its weight and bias packed in C++, in its attribute _packed_params",
    devices=(CPU,),
    skip=QUANTIZES,
)
def quantized_module(cka_memory):
    with cka_memory.measure():
        KEEP.append(quantized("fbgemm", nn.Linear(5, 250)))


@follows(quantized_module)
def quantized_module_deleted(cka_memory):
    with cka_memory.measure():
        KEEP.append(quantized("fbgemm", nn.Linear(5, 250)))
        KEEP.clear()


@advice(
    "no Python object was found that keeps this memory alive, so C++ code keeps it; this may be "
    f"{OF_A_GRAPH}, or the packed parameters of a quantized module (its attribute _packed_params; "
    f"they are freed with the module); {FIND_OUT}",
    devices=(CPU,),
    skip=NATIVE or QUANTIZES,
    is_command=True,
)
def quantized_embedding(cka_memory):
    with cka_memory.measure():
        KEEP.append(quantized("fbgemm", nn.EmbeddingBag(64, 64)))


def one_rank():
    """Start a process group that has this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    CLEANUP.callback(dist.destroy_process_group)


def train(model):
    """Run one backward pass; a thread of gloo drops its reference to the bucket just after it."""
    model(torch.ones(2, 5)).sum().backward()
    time.sleep(0.1)


@advice(
    "no Python object was found that keeps this memory alive; DistributedDataParallel reduces "
    "gradients in buckets, and the buckets are freed with the model; delete the model, its "
    "optimizer and its hooks, or let the gradients be in the buckets with "
    "gradient_as_bucket_view=True",
    devices=(CPU,),
    limit=pytest.mark.max_retained_mb("1400 B"),
    skip=NATIVE,
)
def buckets(cka_memory):
    one_rank()
    layer = nn.Linear(5, 50, bias=False)
    with cka_memory.measure():
        KEEP.append(nn.parallel.DistributedDataParallel(layer))
        train(KEEP[0])


@follows(buckets)
def buckets_freed_with_the_model(cka_memory):
    one_rank()
    layer = nn.Linear(5, 50, bias=False)
    with cka_memory.measure():
        KEEP.append(nn.parallel.DistributedDataParallel(layer))
        train(KEEP[0])
        KEEP.clear()


@follows(buckets)
def buckets_with_the_gradients(cka_memory):
    one_rank()
    layer = nn.Linear(5, 50, bias=False)
    with cka_memory.measure():
        KEEP.append(nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=True))
        train(KEEP[0])


def of_c_code(value):
    """Keep an object by a reference that only C code has."""
    kept, address = ctypes.py_object(value), id(value)
    ctypes.pythonapi.Py_IncRef(kept)
    CLEANUP.callback(lambda: ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object)))


@advice(f"this may be {OF_A_GRAPH}; {FIND_OUT}", devices=(CPU,), skip=NATIVE, is_command=True)
def referenced_by_c_code(cka_memory):
    with cka_memory.measure():
        of_c_code(torch.ones(250))


@advice(
    "this may be autocast, which caches the weights that it has cast until its block ends (measure "
    "around the block, or write torch.autocast(..., cache_enabled=False)), or "
    f"{OF_A_GRAPH}; {FIND_OUT}",
    devices=(CPU,),
    skip=NATIVE,
    is_command=True,
)
def referenced_by_c_code_in_autocast(cka_memory):
    with torch.autocast("cpu", torch.bfloat16), cka_memory.measure():
        of_c_code(torch.ones(250))


@advice(
    f"this may be {OF_A_GRAPH}, or the buckets of DistributedDataParallel (the buckets are freed "
    f"with the model; delete the model, its optimizer and its hooks); {FIND_OUT}",
    devices=(CPU,),
    skip=NATIVE,
    is_command=True,
)
def referenced_by_c_code_in_a_process_group(cka_memory):
    one_rank()
    with cka_memory.measure():
        of_c_code(torch.ones(250))


@advice(
    "no Python object was found that keeps this memory alive; autocast caches the weights that it "
    "has cast until its block ends; measure around the block, or write torch.autocast(..., "
    "cache_enabled=False)",
    devices=(TENSORS,),
)
def cached_by_autocast(cka_memory):
    layer = nn.Linear(5, 50, bias=False)
    with torch.autocast("cpu", torch.bfloat16), cka_memory.measure():
        layer(torch.zeros(0, 5))


@follows(cached_by_autocast)
def measured_around_autocast(cka_memory):
    layer = nn.Linear(5, 50, bias=False)
    with cka_memory.measure(), torch.autocast("cpu", torch.bfloat16):
        layer(torch.zeros(0, 5))


@follows(cached_by_autocast)
def not_cached_by_autocast(cka_memory):
    layer = nn.Linear(5, 50, bias=False)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), cka_memory.measure():
        layer(torch.zeros(0, 5))


@advice(
    "no Python object was found that keeps this memory alive, so C++ code keeps it; this may be "
    "autocast, which caches the weights that it has cast until its block ends (measure around the "
    f"block, or write torch.autocast(..., cache_enabled=False)), or {OF_A_GRAPH}; {FIND_OUT}",
    devices=(CPU,),
    skip=NATIVE,
)
def perhaps_cached_by_autocast(cka_memory):
    layer = nn.Linear(5, 50, bias=False)
    with torch.autocast("cpu", torch.bfloat16), cka_memory.measure():
        layer(torch.zeros(0, 5))


follows(perhaps_cached_by_autocast)(measured_around_autocast)
follows(perhaps_cached_by_autocast)(not_cached_by_autocast)


def clone(x):
    return x.clone()


def keeping(module, inputs):
    """Compile nothing; keep a tensor with the compiled code, as a backend may."""
    kept = torch.ones(250, device=inputs[0].device)
    return lambda *args: module(*args) if len(kept) else ()


@advice(
    "call the function once before measuring; as long as the function exists, "
    "torch.compile keeps its compiled code and what the code's guards and constants "
    "reference (torch._dynamo.reset() frees them)"
)
def compiled(cka_memory):
    x = torch.zeros(1, device=cka_memory.device)
    with cka_memory.measure():
        torch.compile(clone, backend=keeping)(x)
    torch._dynamo.reset()


@follows(compiled)
def compiled_before(cka_memory):
    x = torch.zeros(1, device=cka_memory.device)
    function = torch.compile(clone, backend=keeping)
    function(x)
    with cka_memory.measure():
        function(x)
    torch._dynamo.reset()


@advice(
    "call handle.remove() for the hook of the autograd node, or let the hook use only its "
    "arguments; a hook that references the result keeps the graph alive, and the graph "
    "keeps the hook",
    skip=NATIVE,
)
def hook_of_a_node(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        output.grad_fn.register_hook(Using(output))
        del output


@follows(hook_of_a_node)
def hook_of_a_node_removed(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        handle = output.grad_fn.register_hook(Using(output))
        handle.remove()
        del output, handle


@follows(hook_of_a_node)
def hook_of_a_node_that_uses_its_arguments(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        output.grad_fn.register_hook(Using(None))
        del output


class Using:
    """A hook that has an object."""

    def __init__(self, value):
        self.value = value

    def __call__(self, *gradients):
        pass


@advice(
    "delete the entry from this dict (such as grad_fn.metadata of an autograd node), which C++ "
    "code keeps alive; an entry that references the tensor computed by the node keeps the whole "
    "graph alive",
    skip=NATIVE,
)
def metadata(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        output.grad_fn.metadata["output"] = output
        del output


@follows(metadata)
def metadata_deleted(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        output.grad_fn.metadata["output"] = output
        del output.grad_fn.metadata["output"]
        del output


class Mode(TorchFunctionMode):
    """Changes nothing."""

    kept = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@advice(
    "use the mode in a with statement, or call its __exit__(None, None, None); it was "
    "entered and not left, so torch keeps it",
    skip=NATIVE,
)
def mode_not_left(cka_memory):
    with cka_memory.measure():
        mode = Mode()
        mode.kept = torch.ones(250, device=cka_memory.device)
        mode.__enter__()
        CLEANUP.callback(Mode.__exit__, None, None, None, None)
        del mode


@follows(mode_not_left)
def mode_in_a_with_statement(cka_memory):
    with cka_memory.measure():
        mode = Mode()
        mode.kept = torch.ones(250, device=cka_memory.device)
        with mode:
            pass
        del mode


@follows(mode_not_left)
def mode_left(cka_memory):
    with cka_memory.measure():
        mode = Mode()
        mode.kept = torch.ones(250, device=cka_memory.device)
        mode.__enter__()
        mode.__exit__(None, None, None)
        del mode


@advice(
    "call backward() or delete the result, because torch.utils.checkpoint keeps the inputs and the "
    "state of the random number generator until then; if the checkpointed function references its "
    "own result, remove that reference",
    skip=NATIVE,
)
def checkpointed(cka_memory):
    with cka_memory.measure():
        outputs = []
        outputs.append(checkpoint(Exp(outputs), weight_on(cka_memory.device), use_reentrant=False))
        del outputs


@follows(checkpointed)
def checkpointed_with_backward(cka_memory):
    with cka_memory.measure():
        outputs = []
        outputs.append(checkpoint(Exp(outputs), weight_on(cka_memory.device), use_reentrant=False))
        outputs.pop().sum().backward()
        del outputs


@follows(checkpointed)
def checkpointed_and_deleted(cka_memory):
    with cka_memory.measure():
        outputs = []
        outputs.append(checkpoint(Exp(outputs), weight_on(cka_memory.device), use_reentrant=False))
        del outputs[0]
        del outputs


@follows(checkpointed)
def checkpointed_without_its_result(cka_memory):
    with cka_memory.measure():
        outputs = []
        outputs.append(checkpoint(Exp([]), weight_on(cka_memory.device), use_reentrant=False))
        del outputs


class Exp:
    """A function that references the list of its results."""

    def __init__(self, outputs):
        self.outputs = outputs

    def __call__(self, x):
        return x.exp()


@advice(
    "unregister the function (atexit.unregister() for a callback of atexit), or complete "
    "what will call it, such as a Future; C code keeps the function to call it later",
    skip=NATIVE,
)
def called_at_exit(cka_memory):
    with cka_memory.measure():
        atexit.register(masked(cka_memory.device))


@follows(called_at_exit)
def unregistered(cka_memory):
    with cka_memory.measure():
        function = masked(cka_memory.device)
        atexit.register(function)
        atexit.unregister(function)
        del function


@follows(called_at_exit)
def completed(cka_memory):
    with cka_memory.measure():
        future = torch.futures.Future()
        future.add_done_callback(masked(cka_memory.device))
        future.set_result(None)
        del future


def masked(device):
    mask = torch.ones(250, device=device)
    return lambda *_: mask.sum()


@advice(
    "delete the result of this computation (e.g. the loss), or compute it in torch.no_grad(); only "
    "C++ code, no Python variable, keeps its autograd graph alive",
    skip=NATIVE,
)
def graph_of_c_code(cka_memory):
    with cka_memory.measure():
        of_c_code(weight_on(cka_memory.device).exp().grad_fn)


@follows(graph_of_c_code)
def graph_of_c_code_deleted(cka_memory):
    with cka_memory.measure():
        weight_on(cka_memory.device).exp()


@follows(graph_of_c_code)
def graph_of_c_code_without_gradients(cka_memory):
    with cka_memory.measure(), torch.no_grad():
        of_c_code(weight_on(cka_memory.device).exp().grad_fn)


def captured(allocate, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        allocate()
    KEEP.append(graph)


@advice(
    "no Python object was found that keeps this memory alive; the pool of the graph captured at "
    "advice_of_owners.py:N in captured may keep it; if torch.compile has captured the graph, call "
    f"torch.compiler.reset(); {FIND_OUT}",
    devices=(CARD,),
    limit=pytest.mark.max_retained_mb(1),
    is_command=True,
)
def memory_of_a_graph(cka_memory):
    addresses = []
    with cka_memory.measure():
        captured(lambda: addresses.append(torch.cuda.caching_allocator_alloc(2**21)))
    torch.cuda.caching_allocator_delete(addresses[0])


@advice(
    "delete every graph of the private pool, or the MemPool (until then the pool keeps its "
    "reserved memory); let graphs that never run at the same time share one pool; call "
    "torch.compiler.reset() if torch.compile has captured the graphs",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(30),
)
def pools_of_graphs(cka_memory):
    with cka_memory.measure():
        captured(lambda: torch.ones(5, 2**20, device="cuda"))
        captured(lambda: torch.ones(5, 2**20, device="cuda"))


@follows(pools_of_graphs)
def pool_of_a_deleted_graph(cka_memory):
    with cka_memory.measure():
        captured(lambda: torch.ones(5, 2**20, device="cuda"))
        KEEP.clear()
        captured(lambda: torch.ones(5, 2**20, device="cuda"))


@follows(pools_of_graphs)
def one_pool_of_graphs(cka_memory):
    with cka_memory.measure():
        captured(lambda: torch.ones(5, 2**20, device="cuda"))
        captured(lambda: torch.ones(5, 2**20, device="cuda"), pool=KEEP[0].pool())


@advice(
    "this memory belongs to no tensor that Python code can reach; it may be a library's "
    f"workspace, or C++ code, such as an autograd graph, may hold it; {CUBLAS}if the memory is in "
    "the pool of a CUDA graph, delete the graph or reset() it, then call "
    f"torch.cuda.empty_cache(); {FIND_OUT}",
    devices=(CARD,),
    is_command=True,
)
def memory_without_a_tensor(cka_memory):
    with cka_memory.measure():
        address = torch.cuda.caching_allocator_alloc(2**21)
    torch.cuda.caching_allocator_delete(address)
