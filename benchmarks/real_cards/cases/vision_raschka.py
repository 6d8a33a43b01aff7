"""Fine-tuning ViT-L/16 in nine ways, from float32 to SGD with bfloat16: the highest reserve."""

from collections.abc import Callable
from typing import Any, NamedTuple

from case import CUBLAS_BEFORE_2_7, Case, Figure


class Way(NamedTuple):
    """One of the source's scripts."""

    published: str
    """GB (10**9 bytes) of the highest reserve."""
    batch: int = 64
    precision: str = "float32"
    accumulated: int = 1
    sgd: bool = False


WAYS = {
    "01, float32": Way("26.79"),
    "02, mixed with float16": Way("18.21", precision="mixed"),
    "03, bfloat16": Way("13.82", precision="bfloat16"),
    "04, bfloat16, batch 16": Way("5.69", 16, "bfloat16"),
    "05, bfloat16, batch 4, four accumulated": Way("3.91", 4, "bfloat16", 4),
    "06, the same with SGD": Way("2.02", 4, "bfloat16", 4, sgd=True),
}
MADE = {"07_01, made in float32, then float16": "1.24", "07_03, made in float16": "0.65"}

_HALF = (
    "10.6 MB more for each image, and only in half precision: about a tensor of 197 tokens x 1,024 "
    "in each of 24 layers; the attention of torch 2.1 in half precision is another one"
)

CASE = Case(
    title="ViT-L/16 of torchvision, 224 pixels",
    source="https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md",
    kind="vision",
    card="a100",
    real="A100, as its article says; a nightly of torch 2.1, June 2023, with CUDA 11.8",
    torch="2.1",
    figures={
        **{
            name: Figure(way.published, "GB", "peak reserved", cause=_HALF)
            for name, way in WAYS.items()
        },
        **{
            name: Figure(printed, "GB", "peak reserved", cause="a segment of 20 MiB")
            for name, printed in MADE.items()
        },
    },
    runs=(*WAYS, *MADE),
    needs=("torchvision",),
    environment=CUBLAS_BEFORE_2_7,
    differs=(
        "Six steps and two batches of validation instead of an epoch. What Lightning's Fabric does "
        "for precision is written out. Adam has its denominator as a copy, as in torch 2.0: that "
        "was added after a comparison, in which 05 was 16 % too low by one copy of the weights."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Train for six steps, validate two batches; or only make the model."""
    import torch

    _copy_denominators()
    if run in MADE:
        _make(run)
    else:
        _train(WAYS[run])
    return {run: torch.cuda.max_memory_reserved()}


def _copy_denominators() -> None:
    """Let Adam add its epsilon out of place, as torch 2.0 does: one more copy of the weights."""
    import torch

    kept: list[Any] = []
    add_in_place, divide = torch._foreach_add_, torch._foreach_addcdiv_

    def add(tensors: Any, other: Any, **given: Any) -> None:
        if isinstance(other, float):
            kept.append(torch._foreach_add(tensors, other))
        else:
            add_in_place(tensors, other, **given)

    def divide_and_free(*args: Any, **given: Any) -> None:
        divide(*args, **given)
        kept.clear()

    torch._foreach_add_ = add
    torch._foreach_addcdiv_ = divide_and_free


def _model() -> Any:
    import torch
    from torchvision.models import vit_l_16

    with torch.device("meta"):
        model = vit_l_16()
        model.heads.head = torch.nn.Linear(1024, 10)
    return model


def _make(run: str) -> None:
    import torch

    if run.startswith("07_01"):
        _model().to_empty(device="cuda").to(torch.float16)
    else:
        _model().to(torch.float16).to_empty(device="cuda")


def _train(way: Way) -> None:
    import torch

    if way.precision != "float32":
        torch.set_float32_matmul_precision("high")
    true = torch.bfloat16 if way.precision == "bfloat16" else torch.float32
    model = _model().to(true).to_empty(device="cuda")
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), lr=0.01)
        if way.sgd
        else torch.optim.Adam(model.parameters(), lr=5e-5)
    )
    scaler = torch.amp.GradScaler(enabled=way.precision == "mixed")

    def forward(features: Any) -> Any:
        with torch.autocast("cuda", torch.float16, enabled=way.precision == "mixed"):
            return model(features.to(true)).float()

    seen = torch.zeros(4, 10, dtype=torch.int64, device="cuda")
    for step in range(6):
        model.train()
        features, targets = _batch(way.batch)
        logits = forward(features)
        loss = torch.nn.functional.cross_entropy(logits, targets) / way.accumulated
        if way.accumulated == 1:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step % way.accumulated == 0:
            scaler.step(optimizer)
            scaler.update()
            if way.accumulated > 1:
                optimizer.zero_grad()
        _judge(logits, seen)
    model.eval()
    _validate(forward, way.batch, seen)


def _batch(count: int) -> tuple[Any, Any]:
    import torch

    features = torch.empty(count, 3, 224, 224).to("cuda")
    return features, torch.zeros(count, dtype=torch.int64).to("cuda")


def _judge(logits: Any, seen: Any) -> None:
    import torch

    with torch.no_grad():
        seen += torch.argmax(logits, 1).sum()


def _validate(forward: Callable[[Any], Any], count: int, seen: Any) -> None:
    import torch

    with torch.no_grad():
        for _ in range(2):
            features, _targets = _batch(count)
            _judge(forward(features), seen)
