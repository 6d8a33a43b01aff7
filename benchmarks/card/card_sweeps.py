"""Ask again what a card was asked while sizes varied: what libraries want as a workspace.

    python benchmarks/card/card_sweeps.py RESULT LINES [SWEEP]

RESULT is a ``sweeps.jsonl.gz``: each line says what ran (``about``) and what the card was asked for
(``row``). Each case runs again on the card of this process, real or emulated; its answer is
appended to LINES in the same form. The sizes were drawn at random once.
"""

import gzip
import json
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
from card_layers import Parts, only, passes

About = dict[str, Any]


def rnn(about: About) -> Parts:
    """Return a recurrent layer's passes, or its forward pass without gradients."""
    torch.backends.cudnn.allow_tf32 = about["tf32"]
    layer = getattr(nn, about["kind"])(
        *(about["inp"], about["hidden"], about["layers"]),
        bidirectional=about["bi"],
        dropout=about["drop"],
    ).to("cuda", getattr(torch, about["dtype"]))
    x = torch.randn(about["t"], about["n"], about["inp"], device="cuda")
    x = x.to(getattr(torch, about["dtype"]))
    if about["train"]:
        return passes(layer, x.requires_grad_())
    layer.eval()

    def evaluate() -> Any:
        with torch.no_grad():
            return layer(x)

    return [evaluate]


def norm(about: About) -> Parts:
    """Return the passes of a batch normalization whose channels are last."""
    shape, dtype = about["shape"], getattr(torch, about["dtype"])
    layer = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm3d)(shape[1]).to("cuda")
    if not about["amp"]:
        layer = layer.to(dtype)
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(*shape, device="cuda").to(dtype).contiguous(memory_format=form)
    return passes(layer, x.requires_grad_())


def attention(about: About) -> Parts:
    """Return the passes of attention, by cuDNN or by what torch chooses."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = getattr(torch, about["dtype"])

    def tensor(heads: int, length: int, width: int) -> torch.Tensor:
        if about["layout"] == "bhsd":
            shape = (about["n"], heads, length, width)
            return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(about["train"])
        x = torch.randn(about["n"], length, heads, width, device="cuda").to(dtype).transpose(1, 2)
        return x.detach().requires_grad_(about["train"])

    inputs = [
        tensor(about["h"], about["q"], about["d"]),
        tensor(about["g"], about["k"], about["d"]),
        tensor(about["g"], about["k"], about["dv"]),
    ]
    named: About = {
        "is_causal": about["causal"],
        "dropout_p": about["drop"],
        "enable_gqa": about["g"] != about["h"],
    }
    if about["mask"]:  # for all heads; half of the card's masks had one for each
        shape = (about["n"], 1, about["q"], about["k"])
        named["attn_mask"] = torch.randn(*shape, device="cuda").to(dtype)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        if about["backend"] == "any":
            return functional.scaled_dot_product_attention(*inputs, **named)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(*inputs, **named)

    return passes(attend, *inputs) if about["train"] else [lambda: attend(*inputs)]


def fft(about: About) -> Parts:
    """Return a Fourier transform; its plan is not kept."""
    torch.backends.cuda.cufft_plan_cache.max_size = 0
    sizes, batch = about["sizes"], about["batch"]
    dims = tuple(range(1, len(sizes) + 1))
    real = getattr(torch, about["dtype"])
    if about["kind"] == "r2c":
        x = torch.randn(batch, *sizes, device="cuda", dtype=real)
        return [lambda: torch.fft.rfftn(x, dim=dims)]
    if about["kind"] == "c2c":
        x = torch.randn(batch, *sizes, device="cuda", dtype=real.to_complex())
        return [lambda: torch.fft.fftn(x, dim=dims)]
    half = (*sizes[:-1], sizes[-1] // 2 + 1)
    x = torch.randn(batch, *half, device="cuda", dtype=real.to_complex())
    return [lambda: torch.fft.irfftn(x, s=sizes, dim=dims)]


SOLVERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "inv": torch.linalg.inv_ex,
    "lu": torch.linalg.lu_factor_ex,
    "qr": torch.linalg.qr,
    "svd": torch.linalg.svd,
    "svdvals": torch.linalg.svdvals,
    "eigh": lambda a: torch.linalg.eigh(a + a.mH),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mH),
    "cholesky": lambda a: torch.linalg.cholesky_ex(a @ a.mH),
    "solve": lambda a: torch.linalg.solve_ex(a, a),
    "det": torch.linalg.det,
    "ldl": lambda a: torch.linalg.ldl_factor_ex(a + a.mH),
    "lstsq": lambda a: torch.linalg.lstsq(a, a[..., :1]),
    "eig": torch.linalg.eig,
    "cholesky_inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky_ex(a @ a.mH)[0]),
    "orgqr": lambda a: torch.linalg.householder_product(a, a[..., 0, :].contiguous()),
    "ormqr": lambda a: torch.ormqr(a, a[..., 0, :].contiguous(), a),
    "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(a)[:2], a),
}


def solver(about: About) -> Parts:
    """Return a function of linear algebra."""
    dtype = getattr(torch, about["dtype"].removeprefix("torch."))
    return only(SOLVERS[about["name"]], about["shape"], dtype=dtype)()


def sparse(about: About) -> Parts:
    """Return products of a sparse matrix."""
    generator = torch.Generator().manual_seed(0)
    m, k, dtype = about["m"], about["k"], getattr(torch, about["dtype"])
    dense = torch.randn(m, k, generator=generator)
    kept = torch.rand(m, k, generator=generator) < about["density"]
    dense = (dense * kept).to("cuda", dtype)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "csr": dense.to_sparse_csr,
        "coo": dense.to_sparse,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((4, 4)),
    }
    left = made[about["form"]]()
    x = torch.randn(k, about["c"], device="cuda").to(dtype)
    parts: Parts = [lambda: left @ x, lambda: left @ x[:, 0]]
    if about["form"] == "csr":
        ones = x.new_ones(m, about["c"]), x.new_ones(about["c"], k)
        parts += [
            lambda: left @ left.t().to_sparse_csr(),
            lambda: torch.sparse.sampled_addmm(left, *ones),
            lambda: left + left,
        ]
    return parts


SWEEPS: dict[str, Callable[[About], Parts]] = {
    "rnn": rnn,
    "norm": norm,
    "attention": attention,
    "fft": fft,
    "solver": solver,
    "sparse": sparse,
}


def main() -> None:
    """Run all cases, or those of one sweep."""
    result, path, *chosen = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.cuda.init()
    with gzip.open(result, "rt", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    with Path(path).open("a", encoding="utf-8") as lines:
        for case in cases:
            name, about = case["sweep"], case["about"]
            if name not in SWEEPS or (chosen and name not in chosen):
                continue
            try:
                row = requests(*SWEEPS[name](about))
            except Exception as error:
                row = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            found = {"sweep": name, "about": about, "row": row}
            print(json.dumps(found), file=lines, flush=True)


if __name__ == "__main__":
    main()
