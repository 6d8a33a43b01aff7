"""Layers at sizes of practice: families of cases for ``card_family.py``.

A case is a name and a function that makes its inputs on the card and returns the functions whose
requests are compared, one after another: usually forward and backward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Parts = list[Callable[[], Any]]
Cases = Iterator[tuple[str, Callable[[], Parts]]]
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
FAMILIES: dict[str, Callable[[], Cases]] = {}


def family(function: Callable[[], Cases]) -> Callable[[], Cases]:
    """Add a family under the name of its function."""
    FAMILIES[function.__name__] = function
    return function


def short(dtype: torch.dtype) -> str:
    """Return the name of a type without its module."""
    return str(dtype).removeprefix("torch.")


def passes(function: Callable[..., Any], *inputs: Any) -> Parts:
    """Return the forward and the backward pass of a function of tensors."""
    output: list[Any] = []

    def forward() -> Any:
        result = function(*inputs)
        while isinstance(result, (tuple, list)):
            result = result[0]
        output.append(result)

    def backward() -> None:
        result = output.pop()
        result.backward(torch.ones_like(result))

    return [forward, backward]


def layer(
    module: Callable[[], nn.Module], dtype: torch.dtype, *shape: int, channels_last: bool = False
) -> Callable[[], Parts]:
    """Return a case of a layer and one input."""

    def make() -> Parts:
        made = module().to("cuda", dtype)
        x = torch.randn(*shape, device="cuda").to(dtype)
        if channels_last:
            form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            made, x = made.to(memory_format=form), x.contiguous(memory_format=form)
        return passes(made, x.requires_grad_())

    return make


def only(
    function: Callable[..., Any], *shapes: Any, dtype: Any = torch.float32
) -> Callable[[], Parts]:
    """Return a case of a function without gradients, of tensors with these shapes."""

    def make() -> Parts:
        inputs = [torch.randn(*shape, device="cuda").to(dtype) for shape in shapes]
        return [lambda: function(*inputs)]

    return make


# ---- Convolutions ----

_CONV = {
    "stem": (8, 3, 224, 64, 7, 2, 3, 1),
    "1x1": (8, 256, 56, 64, 1, 1, 0, 1),
    "3x3": (8, 64, 56, 64, 3, 1, 1, 1),
    "3x3 stride 2": (8, 128, 56, 128, 3, 2, 1, 1),
    "1x1 stride 2": (8, 256, 56, 512, 1, 2, 0, 1),
    "3x3 wide": (32, 512, 7, 512, 3, 1, 1, 1),
    "3x3 deep": (4, 256, 128, 256, 3, 1, 1, 1),
    "depthwise": (8, 96, 56, 96, 3, 1, 1, 96),
    "depthwise 7x7": (8, 96, 56, 96, 7, 1, 3, 96),
    "groups": (8, 128, 28, 128, 3, 1, 1, 32),
    "patches": (8, 3, 224, 768, 16, 16, 0, 1),
    "5x5": (16, 32, 32, 64, 5, 1, 2, 1),
    "first of CIFAR": (128, 3, 32, 64, 3, 1, 1, 1),
    "odd": (7, 33, 29, 65, 3, 1, 1, 1),
    "one channel": (64, 1, 28, 32, 3, 1, 1, 1),
}


def _convolution(name: str, dtype: torch.dtype, channels_last: bool) -> Callable[[], Parts]:
    n, c, size, out, kernel, stride, pad, groups = _CONV[name]
    return layer(
        lambda: nn.Conv2d(c, out, kernel, stride, pad, groups=groups),
        dtype,
        *(n, c, size, size),
        channels_last=channels_last,
    )


@family
def convolutions() -> Cases:
    for name in _CONV:
        for dtype in FLOATS:
            for last in (False, True):
                key = f"{name}, {short(dtype)}{', channels last' if last else ''}"
                yield key, _convolution(name, dtype, last)


@family
def convolutions_chosen() -> Cases:
    def with_benchmark(make: Callable[[], Parts]) -> Callable[[], Parts]:
        def made() -> Parts:
            parts = make()

            def on() -> None:
                torch.backends.cudnn.benchmark = True

            def off() -> None:
                torch.backends.cudnn.benchmark = False

            return [on, *parts, off]

        return made

    for name in ("stem", "3x3", "3x3 deep", "depthwise", "1x1"):
        for dtype in (torch.float32, torch.float16):
            yield f"{name}, {short(dtype)}", with_benchmark(_convolution(name, dtype, False))


@family
def convolutions_of_other_dimensions() -> Cases:
    for dtype in FLOATS:
        kind = short(dtype)
        yield f"1d, {kind}", layer(lambda: nn.Conv1d(64, 128, 3, padding=1), dtype, 16, 64, 1000)
        yield (
            f"1d stride, {kind}",
            layer(lambda: nn.Conv1d(1, 512, 10, stride=5), dtype, 4, 1, 16000),
        )
        yield (
            f"3d, {kind}",
            layer(lambda: nn.Conv3d(16, 32, 3, padding=1), dtype, 2, 16, 32, 32, 32),
        )
        yield (
            f"3d channels last, {kind}",
            layer(
                lambda: nn.Conv3d(16, 32, 3, padding=1),
                dtype,
                *(2, 16, 32, 32, 32),
                channels_last=True,
            ),
        )
        yield (
            f"transposed, {kind}",
            layer(lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), dtype, 8, 64, 28, 28),
        )
        yield (
            f"transposed 3d, {kind}",
            layer(lambda: nn.ConvTranspose3d(32, 16, 2, 2), dtype, 2, 32, 16, 16, 16),
        )
        yield (
            f"dilated, {kind}",
            layer(lambda: nn.Conv2d(64, 64, 3, padding=2, dilation=2), dtype, 8, 64, 56, 56),
        )


# ---- Products ----


@family
def products() -> Cases:
    for dtype in (*FLOATS, torch.float64):
        kind = short(dtype)
        yield f"mm 1024, {kind}", only(torch.mm, (1024, 1024), (1024, 1024), dtype=dtype)
        yield f"mm 4096, {kind}", only(torch.mm, (4096, 4096), (4096, 4096), dtype=dtype)
        yield f"mm 1 row, {kind}", only(torch.mm, (1, 4096), (4096, 4096), dtype=dtype)
        yield f"mm deep, {kind}", only(torch.mm, (64, 65536), (65536, 64), dtype=dtype)
        yield f"mv, {kind}", only(torch.mv, (4096, 4096), (4096,), dtype=dtype)
        yield f"dot, {kind}", only(torch.dot, (1 << 20,), (1 << 20,), dtype=dtype)
        yield f"bmm, {kind}", only(torch.bmm, (32, 128, 64), (32, 64, 128), dtype=dtype)
        yield (
            f"baddbmm, {kind}",
            only(torch.baddbmm, (32, 128, 128), (32, 128, 64), (32, 64, 128), dtype=dtype),
        )
        yield f"addmm, {kind}", only(torch.addmm, (512,), (256, 1024), (1024, 512), dtype=dtype)
        yield (
            f"einsum, {kind}",
            only(
                lambda a, b: torch.einsum("bij,bjk->ik", a, b),
                (8, 64, 96),
                (8, 96, 32),
                dtype=dtype,
            ),
        )
        yield f"linear, {kind}", layer(lambda: nn.Linear(1024, 4096), dtype, 8, 128, 1024)
        yield (
            f"linear no bias, {kind}",
            layer(lambda: nn.Linear(1024, 50257, False), dtype, 512, 1024),
        )
        yield f"linear 1, {kind}", layer(lambda: nn.Linear(1024, 1), dtype, 64, 1024)
        yield (
            f"linear gelu, {kind}",
            layer(lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU()), dtype, 256, 512),
        )
        yield f"bilinear, {kind}", _bilinear(dtype)
    yield "int8", _int8
    yield "float8", _float8


def _bilinear(dtype: torch.dtype) -> Callable[[], Parts]:
    def make() -> Parts:
        made = nn.Bilinear(64, 32, 16).to("cuda", dtype)
        sides = (
            torch.randn(128, n, device="cuda", dtype=dtype, requires_grad=True) for n in (64, 32)
        )
        return passes(made, *sides)

    return make


def _int8() -> Parts:
    left = torch.randint(-9, 9, (256, 512), device="cuda", dtype=torch.int8)
    right = torch.randint(-9, 9, (512, 128), device="cuda", dtype=torch.int8)
    return [lambda: torch._int_mm(left, right)]


def _float8() -> Parts:
    left = torch.randn(256, 512, device="cuda").to(torch.float8_e4m3fn)
    right = torch.randn(128, 512, device="cuda").to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device="cuda")
    return [
        lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16),
        lambda: torch._scaled_mm(
            left, right, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
    ]


# ---- Attention ----


@family
def attention() -> Cases:
    from torch.nn.attention import SDPBackend

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
        "any": None,
    }
    shapes = {
        "2x8x512x64": (2, 8, 8, 512, 512, 64),
        "1x12x1000x64": (1, 12, 12, 1000, 1000, 64),
        "4x16x128x128": (4, 16, 16, 128, 128, 128),
        "1x4x2048x256": (1, 4, 4, 2048, 2048, 256),
        "8x4x1x64 on 777": (8, 4, 4, 1, 777, 64),
        "2x8x300x80": (2, 8, 8, 300, 300, 80),
        "grouped 2x16/4x256x64": (2, 16, 4, 256, 256, 64),
    }
    for shape, sizes in shapes.items():
        for backend, chosen in backends.items():
            for dtype in (torch.bfloat16, torch.float32):
                for how in ("", "causal", "mask", "dropout", "no gradient"):
                    key = f"{shape}, {backend}, {short(dtype)}, {how or 'full'}"
                    yield key, _attention(sizes, chosen, dtype, how)


def _attention(
    sizes: tuple[int, ...], backend: Any, dtype: torch.dtype, how: str
) -> Callable[[], Parts]:
    def make() -> Parts:
        from torch.nn.attention import sdpa_kernel

        n, heads, groups, queries, keys, width = sizes
        gradient = how != "no gradient"

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(gradient)

        q = tensor(n, heads, queries, width)
        k, v = tensor(n, groups, keys, width), tensor(n, groups, keys, width)
        named: dict[str, Any] = {"enable_gqa": heads != groups}
        if how == "causal":
            named["is_causal"] = True
        if how == "mask":
            named["attn_mask"] = torch.randn(n, 1, queries, keys, device="cuda").to(dtype)
        if how == "dropout":
            named["dropout_p"] = 0.1

        def attend(*inputs: torch.Tensor) -> torch.Tensor:
            if backend is None:
                return functional.scaled_dot_product_attention(*inputs, **named)
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(*inputs, **named)

        return passes(attend, q, k, v) if gradient else [lambda: attend(q, k, v)]

    return make


@family
def transformers() -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        kind = short(dtype)
        for norm_first in (False, True):
            yield (
                f"encoder layer, {kind}, norm first {norm_first}",
                layer(
                    lambda norm_first=norm_first: nn.TransformerEncoderLayer(
                        512, 8, 2048, batch_first=True, norm_first=norm_first
                    ),
                    dtype,
                    *(8, 128, 512),
                ),
            )
        yield f"encoder layer evaluated, {kind}", _evaluated(dtype)
        yield f"multi-head with weights, {kind}", _multi_head(dtype, True)
        yield f"multi-head, {kind}", _multi_head(dtype, False)


def _evaluated(dtype: torch.dtype) -> Callable[[], Parts]:
    def make() -> Parts:
        made = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).to("cuda", dtype).eval()
        x = torch.randn(8, 128, 512, device="cuda").to(dtype)

        def run() -> Any:
            with torch.no_grad():
                return made(x)

        return [run]

    return make


def _multi_head(dtype: torch.dtype, weights: bool) -> Callable[[], Parts]:
    def make() -> Parts:
        made = nn.MultiheadAttention(512, 8, batch_first=True).to("cuda", dtype)
        x = torch.randn(8, 128, 512, device="cuda").to(dtype).requires_grad_()
        return passes(lambda x: made(x, x, x, need_weights=weights), x)

    return make


# ---- Recurrent layers ----


@family
def recurrent() -> Cases:
    for kind in ("LSTM", "GRU", "RNN"):
        for dtype in FLOATS:
            for layers, both, dropout, hidden in (
                (1, False, 0.0, 128),
                (2, True, 0.1, 256),
                (3, False, 0.0, 512),
                (1, False, 0.0, 2048),
            ):
                ways = ", both ways" if both else ""
                named = {"bidirectional": both, "dropout": dropout, "batch_first": True}
                make = partial(getattr(nn, kind), 64, hidden, layers, **named)
                name = f"{kind}, {short(dtype)}, {layers} layers{ways}, {hidden}"
                yield name, layer(make, dtype, 16, 50, 64)
    yield "LSTM, packed", _packed
    yield (
        "LSTM, projected",
        layer(lambda: nn.LSTM(64, 256, proj_size=64), torch.float32, 50, 16, 64),
    )
    yield "LSTM without gradient", _lstm_without_gradient
    yield "LSTM cell", _cell


def _packed() -> Parts:
    made = nn.LSTM(64, 128, 2).cuda()
    x = torch.randn(50, 16, 64, device="cuda", requires_grad=True)
    lengths = torch.arange(50, 34, -1)

    def run(x: torch.Tensor) -> Any:
        return made(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data

    return passes(run, x)


def _lstm_without_gradient() -> Parts:
    made = nn.LSTM(64, 512, 2, batch_first=True).cuda().eval()
    x = torch.randn(16, 50, 64, device="cuda")

    def run() -> Any:
        with torch.no_grad():
            return made(x)

    return [run]


def _cell() -> Parts:
    made = nn.LSTMCell(64, 128).cuda()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    return passes(made, x)


# ---- Normalization, losses, pooling ----


@family
def norms() -> Cases:
    for dtype in FLOATS:
        kind = short(dtype)
        for size in ((8, 64, 56, 56), (32, 512, 7, 7), (256, 32, 32, 32)):
            for last in (False, True):
                key = f"batch norm {size}, {kind}{', channels last' if last else ''}"
                yield (
                    key,
                    layer(
                        lambda size=size: nn.BatchNorm2d(size[1]), dtype, *size, channels_last=last
                    ),
                )
            yield (
                f"evaluated {size}, {kind}",
                layer(lambda size=size: nn.BatchNorm2d(size[1]).eval(), dtype, *size),
            )
        yield f"batch norm 1d, {kind}", layer(lambda: nn.BatchNorm1d(512), dtype, 256, 512)
        yield f"batch norm 3d, {kind}", layer(lambda: nn.BatchNorm3d(16), dtype, 2, 16, 32, 32, 32)
        yield f"group norm, {kind}", layer(lambda: nn.GroupNorm(32, 256), dtype, 4, 256, 64, 64)
        yield f"instance norm, {kind}", layer(lambda: nn.InstanceNorm2d(64), dtype, 4, 64, 64, 64)
        yield f"layer norm, {kind}", layer(lambda: nn.LayerNorm(768), dtype, 16, 512, 768)
        yield f"layer norm wide, {kind}", layer(lambda: nn.LayerNorm(16384), dtype, 512, 16384)
        yield f"rms norm, {kind}", layer(lambda: nn.RMSNorm(4096), dtype, 4, 512, 4096)
        yield f"weight norm, {kind}", layer(_weight_norm, dtype, 64, 256)
    yield "batch norm in autocast", _norm_in_autocast


def _weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(256, 512))


def _norm_in_autocast() -> Parts:
    made = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()).cuda()
    x = torch.randn(8, 3, 64, 64, device="cuda", requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return made(x)

    return passes(run, x)


@family
def losses() -> Cases:
    def loss(
        function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Callable[[], Parts]:
        def make() -> Parts:
            x = torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
            rest = [n for at, n in enumerate(shape) if at != 1]
            target = torch.randint(0, shape[1], rest, device="cuda")
            return passes(lambda x: function(x, target), x)

        return make

    for dtype in FLOATS:
        kind = short(dtype)
        for shape in ((4096, 50257), (256, 1000), (2, 21, 256, 256), (1_000_000, 10)):
            yield f"cross entropy {shape}, {kind}", loss(functional.cross_entropy, shape, dtype)
        yield (
            f"label smoothing, {kind}",
            loss(
                lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1), (256, 1000), dtype
            ),
        )
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"):
            yield f"{name}, {kind}", _two_inputs(getattr(functional, name), dtype)
    yield (
        "binary cross entropy",
        _two_inputs(functional.binary_cross_entropy_with_logits, torch.float32),
    )
    yield "ctc", _ctc
    yield "triplet", _triplet
    yield "cosine", _two_inputs(lambda a, b: functional.cosine_similarity(a, b), torch.float32)


def _two_inputs(function: Callable[..., Any], dtype: torch.dtype) -> Callable[[], Parts]:
    def make() -> Parts:
        x = torch.randn(512, 1000, device="cuda").to(dtype).requires_grad_()
        target = torch.rand(512, 1000, device="cuda").to(dtype)
        return passes(lambda x: function(x, target), x)

    return make


def _ctc() -> Parts:
    x = torch.randn(50, 16, 20, device="cuda").log_softmax(2).detach().requires_grad_()
    target = torch.randint(1, 20, (16, 30), device="cuda")
    lengths = torch.full((16,), 50, device="cuda"), torch.full((16,), 30, device="cuda")
    return passes(lambda x: functional.ctc_loss(x, target, *lengths), x)


def _triplet() -> Parts:
    sides = [torch.randn(64, 128, device="cuda", requires_grad=True) for _ in range(3)]
    return passes(functional.triplet_margin_loss, *sides)


@family
def pools() -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for last in (False, True):
            kind = f"{short(dtype)}{', channels last' if last else ''}"
            for name, made in {
                "max": lambda: nn.MaxPool2d(3, 2, 1),
                "average": lambda: nn.AvgPool2d(2),
                "adaptive average": lambda: nn.AdaptiveAvgPool2d(1),
                "adaptive average 7": lambda: nn.AdaptiveAvgPool2d(7),
                "adaptive max": lambda: nn.AdaptiveMaxPool2d(7),
                "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
                "nearest": lambda: nn.Upsample(scale_factor=2),
                "bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
                "pixel shuffle": lambda: nn.PixelShuffle(2),
                "reflection": lambda: nn.ReflectionPad2d(1),
                "dropout 2d": lambda: nn.Dropout2d(0.5),
                "lp": lambda: nn.LPPool2d(2, 2),
                "fractional": lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5),
                "unfold": lambda: nn.Unfold(3, padding=1),
            }.items():
                yield f"{name}, {kind}", layer(made, dtype, 4, 64, 32, 32, channels_last=last)
    for name in (
        "ReLU",
        "GELU",
        "SiLU",
        "Softmax",
        "LogSoftmax",
        "Dropout",
        "PReLU",
        "GLU",
        "Hardswish",
    ):
        for dtype in FLOATS:
            yield (
                f"{name}, {short(dtype)}",
                layer(lambda name=name: getattr(nn, name)(), dtype, 16, 128, 1024),
            )
    yield "grid_sample", _grid_sample
    yield "bilinear with antialias", _antialias


def _grid_sample() -> Parts:
    x = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    grid = torch.rand(4, 32, 32, 2, device="cuda", requires_grad=True)
    return passes(lambda x, g: functional.grid_sample(x, g, align_corners=False), x, grid)


def _antialias() -> Parts:
    x = torch.randn(4, 3, 224, 224, device="cuda", requires_grad=True)
    return passes(lambda x: functional.interpolate(x, size=96, mode="bilinear", antialias=True), x)
