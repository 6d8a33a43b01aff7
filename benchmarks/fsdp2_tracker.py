"""Compare FSDP2's memory on emulated devices with what PyTorch's own tracker computes for it.

python benchmarks/fsdp2_tracker.py [--json results.json]

``torch.distributed._tools.fsdp2_mem_tracker`` adds up tensors; PyTorch's tests allow it 10 % beside
the allocator of a card. Two ranks train two steps with Adam. No GPU is needed. Exits with 1 if the
tracker is further off than 10 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOLERANCE = 0.1
CASES = ("transformer", "transformer, parameters kept", "transformer, bfloat16", "linear layers")


def model_of(case: str) -> tuple[Any, Any, Any]:
    """Return the model of a case, the modules that are sharded one by one, and an input."""
    import torch
    from torch.testing._internal.common_fsdp import MLP
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    if case == "linear layers":
        layers = torch.nn.Sequential(*[MLP(512) for _ in range(8)]).cuda()
        return layers, list(layers), torch.randn(64, 512, device="cuda")
    sizes = {"n_layers": 4, "dim": 768, "n_heads": 12, "vocab_size": 8192, "max_seq_len": 512}
    model = Transformer(ModelArgs(**sizes, dropout_p=0.0)).cuda()
    return model, list(model.layers), torch.randint(8192, (4, 512), device="cuda")


def measured_here(case: str) -> dict[str, int | str]:
    """Return the peaks of the tracker and of the allocator on this rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model, blocks, inputs = model_of(case)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if "bfloat16" in case else MixedPrecisionPolicy()
    for block in (*blocks, model):
        fully_shard(block, reshard_after_forward="kept" not in case, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    torch.cuda.reset_peak_memory_stats()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((inputs,))
    with tracker:
        for step in range(2):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            if step == 0:
                tracker.reset_mod_stats()
    tracked = tracker.get_tracker_snapshot("peak")[torch.device("cuda", rank)]["Total"]
    allocated = torch.cuda.memory_stats()["active_bytes.all.peak"]
    dist.destroy_process_group()
    return {"tracker_bytes": tracked, "allocator_bytes": allocated, "torch": torch.__version__}


def measured(case: str) -> dict[str, Any]:
    """Return what rank 0 of two found."""
    emulated = ["-m", "emulated_cuda", "--devices", "2", "--no-values"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, "--one", case, "--into", folder]
        given = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *emulated, *launch, *script], env=given, check=True)
        row: dict[str, Any] = json.loads((Path(folder) / "0").read_text("utf-8"))
        return row


def main() -> None:
    """Print both peaks of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        found = json.dumps(measured_here(args.one))
        (args.into / os.environ["RANK"]).write_text(found, encoding="utf-8")
        return
    rows = [{"case": case, **measured(case)} for case in CASES]
    for row in rows:
        off = row["tracker_bytes"] / row["allocator_bytes"] - 1
        print(f"{row['case']}: allocator {row['allocator_bytes']:,}, tracker off by {off:+.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if any(abs(row["tracker_bytes"] / row["allocator_bytes"] - 1) > TOLERANCE for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
