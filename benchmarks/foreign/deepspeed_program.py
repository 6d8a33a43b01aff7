"""DeepSpeed's getting started, with the network of its own tests: ZeRO stages 0 to 3."""

import sys

sys.path.insert(0, "tests")
import deepspeed
import torch
from unit.simple_model import SimpleModel, random_dataloader

deepspeed.init_distributed()
for stage in (0, 1, 2, 3):
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": optimizer,
            name: {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        torch.manual_seed(0)
        model = SimpleModel(64, nlayers=3)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        losses = []
        loader = random_dataloader(
            model=engine, total_samples=12, hidden_dim=64, device=engine.device, dtype=dtype
        )
        for x, y in loader:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(round(loss.item(), 4))
        if engine.local_rank in (0, -1):
            print("RESULT", stage, name, losses, flush=True)
