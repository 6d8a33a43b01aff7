"""A model of 2 billion parameters on two cards, with and without a sharded optimizer."""

import os
from typing import Any

from case import CUBLAS_BEFORE_2_7, Case, Figure

# Tokens -> GiB at the peak after the model was made; around the sharded step and the plain one.
PUBLISHED = {
    128: ("7.4440598487854", "22.4767", "22.4767", "29.8016", "29.8016"),
    256: ("7.444090366363525", "22.4863", "22.4863", "29.8111", "29.8111"),
    512: ("7.444151401519775", "22.5055", "22.5055", "29.8303", "29.8303"),
}


def _figures() -> dict[str, Figure]:
    found = {}
    for tokens, (made, before, after, plain_before, plain_after) in PUBLISHED.items():
        for way, first, second in (
            ("sharded", before, after),
            ("plain", plain_before, plain_after),
        ):
            name = f"{way}, {tokens} tokens"
            found[f"{name}, after the model"] = Figure(made, "GiB", "peak allocated")
            found[f"{name}, before the step"] = Figure(first, "GiB", "allocated")
            found[f"{name}, after the step"] = Figure(second, "GiB", "allocated")
    return found


CASE = Case(
    title="A language model of 2 billion parameters, float32, two sequences a rank, two ranks",
    source="https://github.com/damek/cs336-assignment2-systems/blob/main/cs336_systems/outputs/optimizer_state_sharding_accounting.md",
    kind="ranks",
    card="a100",
    devices=2,
    real="two cards, not named; torch 2.6.0 (uv.lock)",
    torch="2.6",
    figures=_figures(),
    runs=tuple(f"{way}, {tokens}" for way in ("sharded", "plain") for tokens in PUBLISHED),
    environment={**CUBLAS_BEFORE_2_7, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    differs="Two steps to warm up and one that is measured. The larger of two ranks counts.",
)


def measured(run: str) -> dict[str, int]:
    """Start a process for each rank; the larger figures count."""
    import torch

    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (run, queue), nprocs=2, join=True)
    first, second = queue.get(), queue.get()
    return {f"{run} tokens, {name}": max(first[name], second[name]) for name in first}


def _rank(rank: int, run: str, queue: Any) -> None:
    import torch
    from _transformer import VOCABULARY, PlainAdamW, cross_entropy, model
    from torch import distributed

    way, _, length = run.partition(", ")
    tokens = int(length)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    network = model("xl", tokens)
    weights = list(network.parameters())
    handles: list[Any] = []

    def reduce(parameter: Any) -> None:
        handles.append((parameter, distributed.all_reduce(parameter.grad, async_op=True)))

    with torch.no_grad():
        for tensor in (*weights, *network.buffers()):
            distributed.broadcast(tensor.data, src=0)
    for parameter in weights:
        parameter.register_post_accumulate_grad_hook(reduce)
    found = {"after the model": torch.cuda.max_memory_allocated()}
    kept = [torch.tensor(0, device="cuda")]
    for parameter in weights:
        distributed.broadcast(parameter.data, src=0)
    own = weights[rank::2] if way == "sharded" else weights
    optimizer = PlainAdamW(own)
    local = [torch.empty(2, tokens, dtype=torch.int64, device="cuda") for _ in range(2)]
    kept += [torch.zeros(1, device="cuda") for _ in range(4)]
    for _ in range(3):
        given = _given(rank, tokens, VOCABULARY)
        for tensor, parts in zip(local, given, strict=True):
            distributed.scatter(tensor, parts, src=0)
        logits = network(local[0])
        loss = cross_entropy(logits, local[1])
        loss.backward()
        for parameter, handle in handles:
            handle.wait()
            parameter.grad.div_(torch.as_tensor(2, dtype=torch.float64))
        handles.clear()
        found["before the step"] = torch.cuda.memory_allocated()
        with torch.no_grad():
            optimizer.step()
            if way == "sharded":
                for at, parameter in enumerate(weights):
                    distributed.broadcast(parameter.data, src=at % 2)
        found["after the step"] = torch.cuda.memory_allocated()
    queue.put(found)
    distributed.destroy_process_group()


def _given(rank: int, tokens: int, vocabulary: int) -> tuple[Any, Any]:
    import torch

    if rank:
        return None, None
    whole = [torch.randint(vocabulary, (4, tokens), device="cuda") for _ in range(2)]
    first, second = ([part.contiguous() for part in tensor.chunk(2)] for tensor in whole)
    return first, second
