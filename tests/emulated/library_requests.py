"""Print, as JSON, which workspaces each of the expressions in the argument asks for."""

import contextlib
import gc
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, "benchmarks/card")
from asked import requests  # type: ignore[import-not-found]
from card_sweeps import solver  # type: ignore[import-not-found]

Parts = list[Callable[[], Any]]


def tensor(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = True) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda", dtype=dtype).requires_grad_(gradient)


def passes(function: Callable[..., Any], *inputs: torch.Tensor) -> Parts:
    """Return the forward pass, and the backward pass if an input has a gradient."""
    kept: list[Any] = []

    def forward() -> None:
        found = function(*inputs)
        kept.append(found[0] if isinstance(found, tuple) else found)

    def backward() -> None:
        kept[0].backward(torch.zeros_like(kept[0]))

    return [forward, backward] if inputs[0].requires_grad else [forward]


def attend(
    q: tuple[int, ...],
    k: tuple[int, ...] | None = None,
    v: tuple[int, ...] | None = None,
    *,
    gradient: bool = True,
    named: bool = True,
    masked: bool = False,
    **options: Any,
) -> Parts:
    """Return attention of cuDNN in half precision; not `named` leaves the choice to torch."""
    shapes = q, k or q, v or k or q
    inputs = [tensor(*shape, dtype=torch.bfloat16, gradient=gradient) for shape in shapes]
    if masked:
        options["attn_mask"] = tensor(*q[:3], shapes[1][2], dtype=torch.bfloat16, gradient=False)

    def run(*inputs: torch.Tensor) -> Any:
        chosen = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if named else contextlib.nullcontext()
        with chosen:
            return torch.nn.functional.scaled_dot_product_attention(*inputs, **options)

    return passes(run, *inputs)


def normalize(*shape: int, dtype: torch.dtype = torch.float32) -> Parts:
    """Return batch normalization of channels last, with weights in single precision."""
    channels_last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    module = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm3d
    x = torch.zeros(shape, device="cuda", dtype=dtype).contiguous(memory_format=channels_last)
    return passes(module(shape[1]).cuda(), x.requires_grad_())


def recur(kind: str, length: int, batch: int, *sizes: int, **options: Any) -> Parts:
    """Return a recurrent layer."""
    dtype = options.pop("dtype", torch.float32)
    layer = getattr(torch.nn, kind)(*sizes, **options).to("cuda", dtype)
    return passes(layer, tensor(length, batch, sizes[0], dtype=dtype))


def fourier(name: str, *sizes: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> Parts:
    """Return a transform of all sizes of a batch: of complex numbers, or of real ones."""
    of_complex = name == "fft"
    x = tensor(batch, *sizes, dtype=dtype.to_complex() if of_complex else dtype, gradient=False)
    transform = torch.fft.fftn if of_complex else torch.fft.rfftn
    return [lambda: transform(x, dim=tuple(range(1, x.ndim)))]


def solve(function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> Parts:
    """Return a function of linear algebra."""
    x = tensor(*shape, dtype=dtype, gradient=False)
    return [lambda: function(x)]


def decompose(name: str, dtype: str, shape: tuple[int, ...]) -> Parts:
    """Return a function of linear algebra as in a sweep of a card."""
    parts: Parts = solver({"name": name, "dtype": dtype, "shape": shape})
    return parts


def asked(parts: Parts) -> Any:
    """Return all sizes, negative if they are freed."""
    row = requests(*parts)
    return row.get("failed") or row["events"]


def workspaces(parts: Parts) -> Any:
    """Return the sizes that are freed before anything else is asked for, except single numbers."""
    row = requests(*parts)
    events = row["events"]
    pairs = itertools.pairwise(events)
    return row.get("failed") or [size for size, freed in pairs if size == -freed and size > 8]


def answer(case: str) -> Any:
    parts = eval(case)
    return asked(parts) if case.startswith(("recur", "decompose")) else workspaces(parts)


gc.collect()
gc.freeze()  # the modules of torch, which each request would go through
print(json.dumps({case: answer(case) for case in json.loads(sys.argv[1])}))
