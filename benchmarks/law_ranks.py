"""The law of a step under FSDP in each of 4 emulated ranks; run by ``laws.py``."""

import json
import os

import law_models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from pytest_cka_memory import MemoryProbe


def main() -> None:
    """Find the law and measure beyond it; rank 0 prints a row with the worst of all ranks."""
    import laws

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    law_models.DEVICE = f"cuda:{rank}"
    model = law_models.Model(
        "FSDP", network, law_models.tokens, batch=(2, 4, 8), seq=(128, 256, 512)
    )
    row = laws.row_of(MemoryProbe(law_models.DEVICE), model)
    rows: list[dict[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, {"off": [far["off"] for far in row["far"]]})
    if rank == 0:
        print("ROW", json.dumps({**row, "ranks": rows}), flush=True)
    dist.destroy_process_group()


def network() -> torch.nn.Module:
    """Return a language model whose blocks are sharded."""
    found = law_models.GPT("efficient").to(law_models.DEVICE)
    for block in found.blocks:
        fully_shard(block)
    fully_shard(found)
    return found


if __name__ == "__main__":
    main()
