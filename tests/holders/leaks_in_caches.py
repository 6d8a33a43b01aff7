"""Leaks in what C++ code and compilers keep: TorchScript, functorch, DDP's buckets, FSDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from planted import CLEANUP, KEEP, NO_HOLDER, Table, leak
from torch import nn

CACHES: Table = []
FSDP_HAS_LOOP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
NET = nn.Linear(5, 50, bias=False)


def start_one_rank() -> None:
    """Start a process group that has this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    CLEANUP.callback(dist.destroy_process_group)


@leak(
    CACHES,
    "planted.KEEP[0].get_debug_state() -> a constant of an optimized graph",
    hint="_debug_flush_compilation_cache()",
    made="function(x)",
)
def constant_of_code_that_torchscript_has_optimized() -> None:
    function = torch.jit.script(scaled)
    x = torch.zeros(250, requires_grad=True)
    for _ in range(3):  # the second call optimizes
        function(x)
    KEEP.append(function)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(250) + 1


@leak(CACHES, "planted.KEEP[0].graph.findAllNodes('prim::Constant')[")
def constant_of_a_traced_function() -> None:
    factor = torch.ones(250)
    KEEP.append(torch.jit.trace(lambda x: x * factor, torch.zeros(250)))


@leak(
    CACHES,
    "planted.KEEP[0]._packed_params._packed_params.unpack()[1]",
    hint="delete the quantized module",
    made="quantized(",
)
def bias_of_a_quantized_module() -> None:
    KEEP.append(quantized("fbgemm", nn.Linear(5, 250)))


@leak(
    CACHES,
    NO_HOLDER,
    hint="the packed parameters of a quantized module (its attribute _packed_params",
    size=4608,
    made="quantized(",
)
def weights_of_a_quantized_module_in_the_layout_of_a_library() -> None:
    KEEP.append(quantized("fbgemm", nn.EmbeddingBag(64, 64)))


def quantized(engine: str, layer: nn.Module) -> nn.Module:
    """Return a layer with weights of 8 bits, which a library keeps in its own layout."""
    from torch.ao import quantization

    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"{engine}, which quantizes on x86, is not in this build of torch")
    CLEANUP.callback(setattr, torch.backends.quantized, "engine", torch.backends.quantized.engine)
    torch.backends.quantized.engine = engine
    kind = type(layer)
    rule = quantization.default_dynamic_qconfig
    if kind is nn.EmbeddingBag:
        rule = quantization.float_qparams_weight_only_qconfig
    layer.qconfig = rule
    found: nn.Module = quantization.quantize_dynamic(nn.Sequential(layer), {kind: rule})[0]
    return found


@leak(CACHES, "planted.KEEP[0].__closure__[", size=2004, made="torch.ones(250)")
def graph_of_a_function_of_functorch() -> None:
    _, pull_back = torch.func.vjp(lambda x: x.exp().sum(), torch.ones(250))
    KEEP.append(pull_back)


@leak(
    CACHES,
    NO_HOLDER,
    hint="DistributedDataParallel reduces gradients in buckets, and the buckets are freed with the "
    "model",
    made="DistributedDataParallel(NET)",
)
def buckets_of_a_reducer() -> None:
    start_one_rank()
    KEEP.append(nn.parallel.DistributedDataParallel(NET))


@leak(
    CACHES,
    "the loop Parameter (250,)._modules[0] -> Linear.weight -> Tensor (50, 5).grad_fn -> ",
    hint="use fully_shard() instead",
    size=2000,
    made="FullyShardedDataParallel(",
)
def flat_parameter_of_a_model_that_was_deleted() -> None:
    if not FSDP_HAS_LOOP:
        pytest.skip("torch 2.9 frees the model")
    from torch.distributed.fsdp import FullyShardedDataParallel

    start_one_rank()
    layers = nn.Sequential(nn.Linear(5, 50, bias=False))
    model: Any = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    model(torch.ones(2, 5)).sum().backward()
