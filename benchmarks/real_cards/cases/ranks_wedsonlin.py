"""A sharded optimizer of 3.4 billion parameters on two cards, beside one that is not sharded."""

import os
from typing import Any

from case import Case, Figure

# Sharded, rank -> GiB allocated and peak: after the model, before the step, after the step.
PUBLISHED = {
    ("baseline", 0): ("12.817", "12.817", "25.572", "28.344", "51.008", "51.301"),
    ("baseline", 1): ("12.817", "12.817", "25.572", "28.344", "51.008", "51.301"),
    ("sharded", 0): ("12.817", "12.817", "25.498", "28.319", "38.269", "38.562"),
    ("sharded", 1): ("12.817", "12.817", "25.498", "28.319", "38.265", "38.558"),
}
PHASES = ("after the model", "before the step", "after the step")


def _figures() -> dict[str, Figure]:
    found = {}
    for (mode, rank), printed in PUBLISHED.items():
        for at, phase in enumerate(PHASES):
            name = f"{mode}, rank {rank}, {phase}"
            found[f"{name}, allocated"] = Figure(printed[2 * at], "GiB", "allocated")
            found[f"{name}, peak"] = Figure(printed[2 * at + 1], "GiB", "peak allocated")
    return found


CASE = Case(
    title="A language model of 3.4 billion parameters, autocast, 512 tokens, two ranks",
    source="https://github.com/Wedsonlin/assignment2-systems/tree/main/results",
    kind="ranks",
    card="h100",
    devices=2,
    real="two cards, not named; torch 2.11.0. Their workspaces are those of a Hopper",
    torch="2.11",
    figures=_figures(),
    runs=("baseline", "sharded"),
    seen=(
        "The source's own program was run on emulated cards before: 20 of 24 figures were equal to "
        "the last printed digit. This one was written afterwards."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Start a process for each rank, and return what they measured."""
    import torch

    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (run, queue), nprocs=2, join=True)
    found: dict[str, int] = {}
    for _ in range(2):
        found |= queue.get()
    return found


def _rank(rank: int, run: str, queue: Any) -> None:
    import torch
    from _transformer import VOCABULARY, cross_entropy, model

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2)
    found: dict[str, int] = {}

    def note(phase: str) -> None:
        name = f"{run}, rank {rank}, {phase}"
        found[f"{name}, allocated"] = torch.cuda.memory_allocated()
        found[f"{name}, peak"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    network = model("2.7B", 512, gathered=False)
    handles = _reduced(network)
    note(PHASES[0])
    optimizer = _Sharded(network) if run == "sharded" else _plain(network.parameters())
    inputs, targets = (torch.randint(VOCABULARY, (2, 512), device="cuda") for _ in range(2))
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(network(inputs), targets)
    loss.backward()
    for handle in handles:
        handle.wait()
    handles.clear()
    note(PHASES[1])
    optimizer.step()
    note(PHASES[2])
    queue.put(found)
    torch.distributed.destroy_process_group()


def _plain(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def _reduced(network: Any) -> list[Any]:
    """Give all ranks the same weights, and average each gradient as soon as it is there."""
    import torch
    from torch import distributed

    handles: list[Any] = []

    def reduce(parameter: Any) -> None:
        mean = distributed.ReduceOp.AVG
        handles.append(distributed.all_reduce(parameter.grad, op=mean, async_op=True))

    with torch.no_grad():
        for parameter in network.parameters():
            distributed.broadcast(parameter, src=0)
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return handles


class _Sharded:
    """All weights in one tensor, of which each rank updates half."""

    def __init__(self, network: Any) -> None:
        import torch

        with torch.no_grad():
            whole = list(network.parameters())
            total = sum(parameter.numel() for parameter in whole)
            self.flat = torch.empty(total, device="cuda")
            offset = 0
            for parameter in whole:
                end = offset + parameter.numel()
                self.flat[offset:end].copy_(parameter.data.view(-1))
                parameter.set_(self.flat[offset:end].view_as(parameter))
                offset = end
            share = total // torch.distributed.get_world_size()
            start = torch.distributed.get_rank() * share
            self.shard = self.flat[start : start + share]
            self.parts = []
            offset = 0
            for parameter in whole:
                low, high = max(offset, start), min(offset + parameter.numel(), start + share)
                if low < high:
                    part = self.flat[low:high]
                    self.parts.append((part, parameter, low - offset, high - offset))
                offset += parameter.numel()
            self.optimizer = _plain([part for part, *_ in self.parts])

    def step(self) -> None:
        """Update this rank's half and gather the other one."""
        import torch

        for part, parameter, low, high in self.parts:
            part.grad = parameter.grad.view(-1)[low:high]
        self.optimizer.step()
        torch.distributed.all_gather_into_tensor(self.flat, self.shard)
