"""Which share of half precision on the emulated device equals single precision rounded once.

``python benchmarks/half_rounding.py`` prints a table of operators, each on 4,096 elements in
float16 and in bfloat16. Operators with 100 % in both are counted only; ``--all`` prints them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import emulated_cuda

emulated_cuda.load("h100")

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

COUNT = 4096
TYPES = (torch.float16, torch.bfloat16)
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OF_ONE = (
    *("exp", "expm1", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "erfc", "rsqrt"),
    *("sqrt", "exp2", "sinh", "cosh", "asinh", "atan", "digamma", "lgamma", "i0", "sinc"),
    *("deg2rad", "rad2deg", "reciprocal", "square", "frac"),
)
ACTIVATIONS = (
    *("gelu", "silu", "mish", "softplus", "elu", "selu", "celu", "hardswish", "hardsigmoid"),
    *("logsigmoid", "leaky_relu", "tanhshrink", "softsign", "softshrink", "hardshrink"),
)
OF_TWO = ("mul", "div", "atan2", "hypot", "fmod", "remainder", "logaddexp", "copysign")
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss")
ALONG_ROWS = ("sum", "mean", "cumsum", "softmax", "log_softmax", "logsumexp", "var")
OPERATORS: dict[str, Function] = {
    "add, alpha": lambda x, y, z: torch.add(x, y, alpha=0.3),
    "sub, alpha": lambda x, y, z: torch.sub(x, y, alpha=0.3),
    "rsub, alpha": lambda x, y, z: torch.rsub(x, y, alpha=0.3),
    "add, number": lambda x, y, z: x + 0.3,
    "mul, number": lambda x, y, z: x * 0.3,
    "div, number": lambda x, y, z: x / 0.3,
    "logit": lambda x, y, z: torch.logit(x.abs().clamp(0.125, 0.75)),
    "logit, eps": lambda x, y, z: torch.logit(x, 0.1),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
    "lerp": lambda x, y, z: torch.lerp(x, y, 0.3),
    "pow, 3": lambda x, y, z: x**3,
    "pow, 2.5": lambda x, y, z: x.abs() ** 2.5,
    "xlogy": lambda x, y, z: torch.xlogy(x.abs(), y.abs()),
    "_foreach_add, alpha": lambda x, y, z: torch._foreach_add([x], [y], alpha=0.3)[0],
    "_foreach_addcmul": lambda x, y, z: torch._foreach_addcmul([x], [y], [z], 0.3)[0],
    "_foreach_lerp": lambda x, y, z: torch._foreach_lerp([x], [y], 0.3)[0],
    "layer_norm": lambda x, y, z: F.layer_norm(x.view(64, 64), (64,)),
    "rms_norm": lambda x, y, z: F.rms_norm(x.view(64, 64), (64,)),
    **{name: lambda x, y, z, name=name: getattr(torch, name)(x) for name in OF_ONE},
    **{name: lambda x, y, z, name=name: getattr(F, name)(x) for name in ACTIVATIONS},
    **{name: lambda x, y, z, name=name: getattr(torch, name)(x, y) for name in OF_TWO},
    **{
        name: lambda x, y, z, name=name: getattr(F, name)(x, y, reduction="none") for name in LOSSES
    },
    **{
        name: lambda x, y, z, name=name: getattr(torch, name)(x.view(64, 64), 1)
        for name in ALONG_ROWS
    },
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "uniform_": (-1, 2),
    "normal_": (2, 3),
    "exponential_": (),
    "cauchy_": (),
    "log_normal_": (),
    "bernoulli_": (0.3,),
}


def share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return which share of elements are equal, in percent."""
    equal = (found == expected) | (found.isnan() & expected.isnan())
    return equal.float().mean().item() * 100


def of_operator(function: Function, dtype: torch.dtype) -> float:
    """Return the share for an operator."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(COUNT, generator=generator).to(dtype) for _ in range(3)]
    expected = function(*[one.float() for one in given]).to(dtype)
    return share(function(*[one.cuda() for one in given]).cpu(), expected)


def of_numbers(name: str, dtype: torch.dtype) -> float:
    """Return the share for random numbers."""
    found = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(0)
        tensor = torch.empty(COUNT, dtype=kind, device="cuda")
        found.append(getattr(tensor, name)(*NUMBERS[name]).cpu())
    return share(found[1], found[0].to(dtype))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = {name: [of_operator(one, dtype) for dtype in TYPES] for name, one in OPERATORS.items()}
    rows |= {name: [of_numbers(name, dtype) for dtype in TYPES] for name in NUMBERS}
    print("| operator | float16, % | bfloat16, % |\n| --- | --- | --- |")
    for name, shares in rows.items():
        if "--all" in sys.argv or min(shares) < 100:
            print(f"| `{name}` | {shares[0]:.1f} | {shares[1]:.1f} |")
    whole = sum(min(shares) == 100 for shares in rows.values())
    print(f"{whole} of {len(rows)} operators have 100 % in both")


if __name__ == "__main__":
    main()
