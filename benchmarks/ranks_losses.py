"""Train on several emulated devices and compare each loss with that of one process on the CPU.

python benchmarks/ranks_losses.py [--ways NAME ...] [--json results.json]

Twenty steps of Adam, in float32, on one batch: DDP, FSDP2, FSDP2 with tensor parallelism (four
ranks), and a pipeline of two stages with two schedules; all with NCCL. No GPU is needed. Exits with
1 if a loss is off by more than 1e-5 of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
STEPS, BATCH, WIDTH = 20, 16, 32
RANKS = {
    "DDP": 2,
    "FSDP2": 2,
    "FSDP2 x tensor parallel": 4,
    "pipeline, GPipe": 2,
    "pipeline, 1F1B": 2,
}


def new_model() -> Any:
    """Return two blocks of a linear layer, an activation and a linear layer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    other = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(nn.Sequential(*block), nn.Sequential(*other))


def data() -> tuple[Any, Any]:
    """Return inputs and targets of shape (BATCH, WIDTH)."""
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, BATCH, WIDTH, generator=generator)
    return inputs, targets


def losses_of(model: Any, inputs: Any, targets: Any) -> list[float]:
    """Train; return the loss of each step, which is the mean over this rank's samples."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(way: str, rank: int) -> Any:
    """Return the model, parallelized, and the rank's index among those with other samples."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = new_model().cuda()
    if way == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank]), rank
    if way == "FSDP2":
        mesh, sample_rank = init_device_mesh("cuda", (2,)), rank
    else:
        mesh_2d = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
        for block in model:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, mesh_2d["tensor"], plan)
        mesh, sample_rank = mesh_2d["data"], rank // 2
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    return model, sample_rank


def losses_with_samples_divided(way: str, rank: int) -> list[float]:
    """Train with half of the samples on each rank; return the mean of the ranks' losses."""
    import torch
    import torch.distributed as dist

    model, sample_rank = parallel(way, rank)
    inputs, targets = (tensor.chunk(2)[sample_rank].cuda() for tensor in data())
    losses = torch.tensor(losses_of(model, inputs, targets), device="cuda")
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return [float(loss) for loss in losses.tolist()]


def losses_of_pipeline(way: str, rank: int) -> list[float]:
    """Train a stage on each rank with four microbatches; return the losses of the last stage."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    module = new_model()[rank].cuda()
    stage = PipelineStage(module, rank, 2, torch.device("cuda", rank))
    schedule_class = Schedule1F1B if way.endswith("1F1B") else ScheduleGPipe
    schedule = schedule_class(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    inputs, targets = (tensor.cuda() for tensor in data())
    means = []
    for _ in range(STEPS):
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return means


def run_rank(way: str, into: Path) -> None:
    """Train as a rank; the last rank writes its losses."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    train = losses_of_pipeline if way.startswith("pipeline") else losses_with_samples_divided
    losses = train(way, rank)
    if rank == RANKS[way] - 1:
        into.write_text(json.dumps(losses), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def losses_on_devices(way: str) -> list[float]:
    """Return the losses of a way to train, from ranks in processes of their own."""
    ranks = str(RANKS[way])
    emulated = ["-m", "emulated_cuda", "--devices", ranks]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        script = [__file__, "--one", way, "--into", str(file)]
        given = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *emulated, *launch, *script], env=given, check=True)
        found: list[float] = json.loads(file.read_text("utf-8"))
        return found


def main() -> None:
    """Print how far each way is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=RANKS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_rank(args.one, args.into)
        return
    expected = losses_of(new_model(), *data())
    rows = []
    for way in args.ways:
        found = losses_on_devices(way)
        off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        rows.append({"way": way, "ranks": RANKS[way], "steps": len(found), "off": off})
        print(
            f"{way}: {RANKS[way]} ranks, {len(found)} steps, off by at most {off:.1e}", flush=True
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if any(row["off"] > TOLERANCE for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
