"""Whole programs: what each asks for from its first tensor to its last, and its reserve.

    python benchmarks/card/card_programs.py NAME LINES

Each runs in a process of its own on the card of that process, real or emulated, and appends one
line of JSON.
"""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))

from asked import requests

PROGRAMS: dict[str, Callable[[], Any]] = {}
NEED_VALUES = ("PyG, graph convolutions", "DDP, one rank")
"""Programs whose sizes depend on values, or that compare what ranks sent."""
ENVIRONMENTS: dict[str, dict[str, str]] = {}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
STEPS = 3


def program(name: str, **environment: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a program."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[name] = function
        ENVIRONMENTS[name] = environment
        return function

    return add


def train(
    model: nn.Module,
    inputs: Callable[[], tuple[Any, ...]],
    loss: Callable[..., torch.Tensor],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    steps: int = STEPS,
) -> None:
    """Train a model for a few steps, as a usual loop does it."""
    chosen = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=autocast is torch.float16)
    context = torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext()
    for _ in range(steps):
        batch = inputs()
        with context:
            value = loss(model, *batch)
        scaler.scale(value).backward()
        scaler.step(chosen)
        scaler.update()
        chosen.zero_grad()


def images(count: int, size: int = 224, channels: int = 3) -> Callable[[], tuple[Any, ...]]:
    """Return a function that gives a batch of images and classes."""

    def batch() -> tuple[Any, ...]:
        return (
            torch.randn(count, channels, size, size).cuda(),
            torch.zeros(count, dtype=torch.long).cuda(),
        )

    return batch


def tokens(count: int, length: int, vocabulary: int = 50257) -> Callable[[], tuple[Any, ...]]:
    """Return a function that gives a batch of tokens."""

    def batch() -> tuple[Any, ...]:
        return (torch.randint(0, vocabulary, (count, length)).cuda(),)

    return batch


def classified(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a classifier."""
    return functional.cross_entropy(model(x), target)


def of_labels(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of a language model of transformers."""
    result: torch.Tensor = model(input_ids=x, labels=x).loss
    return result


# ---- A transformer in plain torch ----


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int, causal_math: bool = False) -> None:
        super().__init__()
        self.heads, self.causal_math = heads, causal_math
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        heads = self.qkv(self.first(x)).view(n, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if self.causal_math:
            scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5)
            mask = torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
            y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """GPT-2 of any size."""

    def __init__(
        self, width: int, heads: int, layers: int, *, length: int = 1024, math: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50257, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, math) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50257, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for number, block in enumerate(self.blocks):
            if self.checkpointed and number % self.checkpointed == 0 and self.training:
                h = checkpoint(block, h, use_reentrant=False)
            else:
                h = block(h)
        return self.head(self.norm(h))


def next_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token."""
    logits = model(x)
    return functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1)
    )


def gpt(
    *,
    math: bool = False,
    checkpointed: int = 0,
    autocast: torch.dtype | None = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
    **named: Any,
) -> None:
    """Train GPT-2, 124 M."""
    model = Gpt(768, 12, 12, math=math).to("cuda", dtype)
    model.checkpointed = checkpointed
    train(model, tokens(4, 1024), next_token, autocast=autocast, **named)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW in one kernel."""
    return torch.optim.AdamW(parameters, fused=True)


program("GPT-2 124M, bfloat16 autocast")(lambda: gpt())
program("GPT-2 124M, float32")(lambda: gpt(autocast=None))
program("GPT-2 124M, float16 with GradScaler")(lambda: gpt(autocast=torch.float16))
program("GPT-2 124M, bfloat16 weights")(lambda: gpt(autocast=None, dtype=torch.bfloat16))
program("GPT-2 124M, attention by hand")(lambda: gpt(math=True))
program("GPT-2 124M, checkpointing of all blocks")(lambda: gpt(checkpointed=1))
program("GPT-2 124M, checkpointing of every 3rd block")(lambda: gpt(checkpointed=3))
program("GPT-2 124M, fused AdamW")(lambda: gpt(optimizer=fused))
program("GPT-2 124M, SGD")(lambda: gpt(optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)))
program("GPT-2 124M, expandable segments", **EXPANDABLE)(lambda: gpt())


@program("GPT-2 350M, no gradients, growing lengths")
def _inference() -> None:
    model = Gpt(1024, 16, 24).cuda().bfloat16().eval()
    with torch.no_grad():
        for length in (128, 700, 256, 1000, 512):
            model(torch.zeros(8, length, dtype=torch.long, device="cuda"))


@program("GPT-2, saved tensors on the host")
def _offload() -> None:
    model = Gpt(512, 8, 6).cuda()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return next_token(model, x)

    train(model, tokens(4, 512), loss)


@program(
    "GPT-2, lengths that change",
)
def _lengths() -> None:
    model = Gpt(512, 8, 6).cuda()
    lengths = iter((100, 1000, 333, 777, 512, 64, 900, 450, 1024, 200))

    def batch() -> tuple[Any, ...]:
        return (torch.zeros(8, next(lengths), dtype=torch.long).cuda(),)

    train(model, batch, next_token, autocast=torch.bfloat16, steps=10)


program("GPT-2, lengths that change, expandable segments", **EXPANDABLE)(_lengths)


@program("GPT-2, accumulation and clipping")
def _accumulated() -> None:
    model = Gpt(512, 8, 6).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        for _ in range(4):
            x = torch.zeros(2, 512, dtype=torch.long).cuda()
            (next_token(model, x) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


# ---- torchvision ----


def _vision(name: str, count: int, size: int = 224, **named: Any) -> None:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    if named.pop("channels_last", False):
        model = model.to(memory_format=torch.channels_last)
    named.setdefault("optimizer", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))

    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(x)
        return functional.cross_entropy(getattr(output, "logits", output), target)

    train(model.cuda(), images(count, size), loss, **named)


for _name, _count in {
    "resnet18": 64,
    "resnet50": 32,
    "vgg16": 16,
    "alexnet": 64,
    "squeezenet1_1": 32,
    "densenet121": 16,
    "mobilenet_v2": 32,
    "mobilenet_v3_large": 32,
    "efficientnet_b0": 32,
    "convnext_tiny": 16,
    "swin_t": 16,
    "vit_b_16": 16,
    "regnet_y_400mf": 32,
    "googlenet": 32,
    "shufflenet_v2_x1_0": 32,
    "maxvit_t": 8,
    "resnext50_32x4d": 16,
    "mnasnet1_0": 32,
}.items():
    program(f"torchvision {_name}, float32")(lambda n=_name, c=_count: _vision(n, c))
for _name in ("resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0"):
    program(f"torchvision {_name}, float16 with GradScaler")(
        lambda n=_name: _vision(n, 32, autocast=torch.float16)
    )
    program(f"torchvision {_name}, bfloat16, channels last")(
        lambda n=_name: _vision(n, 32, autocast=torch.bfloat16, channels_last=True)
    )


@program("torchvision resnet50, no gradients")
def _evaluated() -> None:
    import torchvision

    model = torchvision.models.resnet50(weights=None).cuda().eval()
    with torch.inference_mode():
        for count in (1, 64, 8, 256, 32):
            model(torch.randn(count, 3, 224, 224).cuda())


@program("torchvision deeplabv3_resnet50")
def _segmented() -> None:
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(
        weights=None, weights_backbone=None, num_classes=21
    ).cuda()

    def batch() -> tuple[Any, ...]:
        target = torch.zeros(4, 256, 256, dtype=torch.long).cuda()
        return torch.randn(4, 3, 256, 256).cuda(), target

    train(model, batch, lambda m, x, t: functional.cross_entropy(m(x)["out"], t))


# ---- Other networks ----


class UNet(nn.Module):
    """A small U-Net in two or three dimensions."""

    def __init__(self, dimensions: int, width: int) -> None:
        super().__init__()
        conv = nn.Conv2d if dimensions == 2 else nn.Conv3d
        norm = nn.GroupNorm
        pool = nn.MaxPool2d if dimensions == 2 else nn.MaxPool3d
        up = nn.ConvTranspose2d if dimensions == 2 else nn.ConvTranspose3d

        def double(given: int, made: int) -> nn.Module:
            return nn.Sequential(
                *(conv(given, made, 3, padding=1), norm(8, made), nn.SiLU()),
                *(conv(made, made, 3, padding=1), norm(8, made), nn.SiLU()),
            )

        self.down = nn.ModuleList([double(1, width), double(width, 2 * width)])
        self.middle = double(2 * width, 4 * width)
        self.up = nn.ModuleList([up(4 * width, 2 * width, 2, 2), up(2 * width, width, 2, 2)])
        self.joined = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
        self.pool, self.head = pool(2), conv(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def _unet(dimensions: int, size: int, **named: Any) -> None:
    model = UNet(dimensions, 32).cuda()

    def batch() -> tuple[Any, ...]:
        return (torch.randn(2, 1, *(size,) * dimensions).cuda(),)

    train(model, batch, lambda m, x: functional.mse_loss(m(x), x), **named)


program("U-Net, float32")(lambda: _unet(2, 256))
program("U-Net, bfloat16 autocast")(lambda: _unet(2, 256, autocast=torch.bfloat16))
program("U-Net 3D, float32")(lambda: _unet(3, 64))
program("U-Net 3D, float16 with GradScaler")(lambda: _unet(3, 64, autocast=torch.float16))


@program("DCGAN")
def _gan() -> None:
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False), nn.BatchNorm2d(512), nn.ReLU(True)),
        *(nn.ConvTranspose2d(512, 256, 4, 2, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU(True)),
        *(nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU(True)),
        *(nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)),
        *(nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh()),
    ).cuda()
    judge = nn.Sequential(
        *(nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)),
        *(nn.Conv2d(64, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.LeakyReLU(0.2, True)),
        *(nn.Conv2d(128, 256, 4, 2, 1, bias=False), nn.BatchNorm2d(256), nn.LeakyReLU(0.2, True)),
        *(nn.Conv2d(256, 512, 4, 2, 1, bias=False), nn.BatchNorm2d(512), nn.LeakyReLU(0.2, True)),
        *(nn.Conv2d(512, 1, 4, 1, 0, bias=False), nn.Flatten()),
    ).cuda()
    first = torch.optim.Adam(generator.parameters(), 2e-4)
    second = torch.optim.Adam(judge.parameters(), 2e-4)
    for _ in range(STEPS):
        real = torch.randn(64, 3, 64, 64).cuda()
        fake = generator(torch.randn(64, 100, 1, 1, device="cuda"))
        second.zero_grad()
        loss = judge(real).mean() - judge(fake.detach()).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        judge(fake).mean().backward()
        first.step()


@program("LSTM language model")
def _lstm() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.rnn = nn.Embedding(10000, 256), nn.LSTM(256, 512, 2, batch_first=True)
            self.head = nn.Linear(512, 10000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(self.words(x))[0])

    train(Model().cuda(), tokens(32, 64, 10000), next_token)


@program("two streams")
def _streams() -> None:
    side = torch.cuda.Stream()
    weight = torch.randn(2048, 2048, device="cuda")
    for count in (256, 512, 1024):
        x = torch.randn(count, 2048).cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ weight
        torch.cuda.current_stream().wait_stream(side)
        (y @ weight).sum()
        torch.cuda.synchronize()


@program("a graph of a training step")
def _graph() -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x = torch.randn(64, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()


# ---- Compiled ----


def _compiled(mode: str | None) -> None:
    model = nn.Sequential(*(Block(256, 4) for _ in range(2))).cuda()
    compiled = torch.compile(model, mode=mode)

    def batch() -> tuple[Any, ...]:
        return (torch.randn(4, 256, 256).cuda(),)

    train(compiled, batch, lambda m, x: m(x).square().mean(), steps=5)


program("compiled blocks")(lambda: _compiled(None))
program("compiled blocks, reduce-overhead")(lambda: _compiled("reduce-overhead"))


# ---- transformers, peft, timm, PyG, one rank ----


def _language(kind: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    for name in (f"{kind}ForCausalLM", f"{kind}LMHeadModel", f"{kind}ForMaskedLM"):
        if hasattr(transformers, name):
            made: nn.Module = getattr(transformers, name)(config).cuda()
            return made
    raise SystemExit(f"no model of {kind}")


_LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
for _kind, _sizes in {
    "GPT2": {"n_embd": 512, "n_layer": 6, "n_head": 8},
    "Llama": _LLAMA,
    "Mistral": _LLAMA,
    "Qwen2": _LLAMA,
    "Qwen3": _LLAMA,
    "Gemma": {**_LLAMA, "head_dim": 64},
    "Phi": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "OPT": {"hidden_size": 512, "num_hidden_layers": 6, "ffn_dim": 2048, "num_attention_heads": 8},
    "Bert": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
    "Roberta": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
    "GPTNeoX": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
    "Bloom": {"hidden_size": 512, "n_layer": 4, "n_head": 8, "vocab_size": 50304},
}.items():
    program(f"transformers {_kind}, bfloat16 autocast")(
        lambda k=_kind, s=_sizes: train(
            _language(k, **s), tokens(4, 256, 30000), of_labels, autocast=torch.bfloat16
        )
    )


@program("transformers Llama, generation with a cache")
def _generated() -> None:
    model = _language("Llama", **_LLAMA).bfloat16().eval()
    prompt = torch.ones(4, 100, dtype=torch.long, device="cuda")
    with torch.no_grad():
        past = None
        inputs = prompt
        for _ in range(60):
            output = model(input_ids=inputs, past_key_values=past, use_cache=True)
            past = output.past_key_values
            inputs = torch.ones(4, 1, dtype=torch.long, device="cuda")


@program("transformers Llama, gradient checkpointing")
def _checkpointed() -> None:
    model = _language("Llama", **_LLAMA)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    train(model, tokens(4, 512, 32000), of_labels, autocast=torch.bfloat16)


@program("transformers ViT")
def _vit() -> None:
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig()).cuda()
    train(model, images(16), lambda m, x, t: functional.cross_entropy(m(pixel_values=x).logits, t))


@program("peft LoRA on Llama")
def _lora() -> None:
    import peft

    model = _language("Llama", **_LLAMA).bfloat16()
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=8)
    train(peft.get_peft_model(model, config), tokens(4, 256, 32000), of_labels)


for _name in ("vit_small_patch16_224", "convnext_nano", "mixer_s32_224", "resnetv2_50"):

    def _of_timm(name: str = _name) -> None:
        import timm

        train(timm.create_model(name).cuda(), images(16), classified, autocast=torch.bfloat16)

    program(f"timm {_name}, bfloat16 autocast")(_of_timm)


@program("PyG, graph convolutions")
def _graphs() -> None:
    from torch_geometric.nn import GCNConv, SAGEConv

    edges = torch.stack([torch.arange(20000) % 2000, (torch.arange(20000) * 7) % 2000]).cuda()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = GCNConv(128, 256), SAGEConv(256, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x, edges).relu(), edges)

    def batch() -> tuple[Any, ...]:
        return torch.randn(2000, 128).cuda(), torch.zeros(2000, dtype=torch.long).cuda()

    train(Model().cuda(), batch, classified)


@contextlib.contextmanager
def _group() -> Any:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@program("DDP, one rank")
def _ddp() -> None:
    with _group():
        model = nn.parallel.DistributedDataParallel(Gpt(256, 4, 4).cuda())
        train(model, tokens(4, 256), next_token)


@program("FSDP2, one rank")
def _fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    with _group():
        model = Gpt(256, 4, 4).cuda()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        train(model, tokens(4, 256), next_token)


def main() -> None:
    """Run one program."""
    name, path = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.cuda.init()
    row = requests(PROGRAMS[name], empty=False)
    with path.open("a", encoding="utf-8") as lines:
        print(json.dumps({"name": name, "rows": {"": [row]}}), file=lines, flush=True)


if __name__ == "__main__":
    main()
