"""Functions at sizes of practice: further families of cases for ``card_family.py``."""

from collections.abc import Callable
from typing import Any

import torch
from card_layers import FAMILIES, FLOATS, Cases, Parts, family, only, passes, short
from torch import nn
from torch.nn import functional

__all__ = ["FAMILIES"]

# ---- Sorting, indexing, scanning ----


@family
def sorting() -> Cases:
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "sort": lambda x: x.sort(),
        "stable sort": lambda x: x.sort(stable=True),
        "sort of columns": lambda x: x.sort(0),
        "argsort": lambda x: x.argsort(descending=True),
        "topk 10": lambda x: x.topk(min(10, x.shape[-1])),
        "topk half": lambda x: x.topk(max(1, x.shape[-1] // 2)),
        "kthvalue": lambda x: x.kthvalue(1),
        "median": lambda x: x.median(-1),
        "median of all": lambda x: x.median(),
        "mode": lambda x: x.mode(),
        "unique": lambda x: x.unique(),
        "unique, counts": lambda x: x.unique(return_inverse=True, return_counts=True),
        "unique rows": lambda x: x.unique(dim=0) if x.ndim > 1 else None,
        "unique consecutive": lambda x: x.unique_consecutive(),
        "nonzero": lambda x: x.nonzero(),
        "masked select": lambda x: x[x > 0],
        "cumsum": lambda x: x.cumsum(-1),
        "cumprod": lambda x: x.cumprod(-1),
        "cummax": lambda x: x.cummax(-1),
        "logcumsumexp": lambda x: x.logcumsumexp(-1),
        "cumsum of columns": lambda x: x.cumsum(0),
        "sum": lambda x: x.sum(),
        "sum of rows": lambda x: x.sum(-1),
        "sum of columns": lambda x: x.sum(0),
        "max": lambda x: x.max(),
        "argmax": lambda x: x.argmax(),
        "argmax of rows": lambda x: x.argmax(-1),
        "std": lambda x: x.std(),
        "var of columns": lambda x: x.var(0),
        "norm": lambda x: x.norm(),
        "logsumexp": lambda x: x.logsumexp(-1),
        "any": lambda x: (x > 0).any(),
        "histc": lambda x: x.histc(100),
        "bincount": lambda x: x.abs().mul(3).long().flatten().bincount(),
        "searchsorted": lambda x: torch.searchsorted(x, x),
        "bucketize": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 9, device="cuda")),
        "flip": lambda x: x.flip(0),
        "roll": lambda x: x.roll(3),
        "quantile": lambda x: x[:1000].quantile(0.5),
        "isin": lambda x: torch.isin(x, x[:10]),
        "softmax of all": lambda x: x.flatten().softmax(0),
    }
    for name, function in functions.items():
        for shape in ((1000,), (1_000_000,), (64, 1000), (1000, 64), (8, 50257), (2048, 4096)):
            yield f"{name} {shape}", only(function, shape)


@family
def indexing() -> Cases:
    for rows, count in ((1000, 100), (50257, 4096), (50257, 20000), (1_000_000, 300)):
        for dtype in (torch.float32, torch.bfloat16):
            at = f"{rows} rows, {count}, {short(dtype)}"
            yield f"embedding, {at}", _looked_up(rows, count, dtype, "embedding")
            yield f"embedding bag, {at}", _looked_up(rows, count, dtype, "bag")
            yield f"index, {at}", _looked_up(rows, count, dtype, "index")
            yield f"index_select, {at}", _looked_up(rows, count, dtype, "index_select")
            yield f"gather, {at}", _looked_up(rows, count, dtype, "gather")
            yield f"index_put, {at}", _written(rows, count, dtype, "index_put")
            yield f"index_add, {at}", _written(rows, count, dtype, "index_add")
            yield f"scatter_add, {at}", _written(rows, count, dtype, "scatter_add")
            yield f"scatter_reduce, {at}", _written(rows, count, dtype, "scatter_reduce")
            yield f"set, {at}", _written(rows, count, dtype, "set")
    yield "embedding with scale by frequency", _scaled_embedding
    yield "sparse embedding", _sparse_embedding
    yield "multinomial", only(lambda x: x.softmax(-1).multinomial(5), (16, 50257))
    yield (
        "multinomial with replacement",
        only(lambda x: x.softmax(-1).multinomial(5, True), (16, 50257)),
    )
    for count in (100, 20000, 40000, 1_000_000):
        yield (
            f"randperm {count}",
            lambda count=count: [lambda: torch.randperm(count, device="cuda")],
        )
    yield "randint", lambda: [lambda: torch.randint(0, 9, (1000,), device="cuda")]
    yield "bernoulli", only(lambda x: x.sigmoid().bernoulli(), (1000, 1000))
    yield "cdist", only(torch.cdist, (512, 64), (1024, 64))
    yield "cdist exact", only(lambda a, b: torch.cdist(a, b, p=1), (512, 64), (1024, 64))
    yield "pdist", only(torch.pdist, (512, 64))
    yield "tril_indices", lambda: [lambda: torch.tril_indices(500, 500, device="cuda")]
    yield "repeat_interleave", only(lambda x: x.repeat_interleave(3, 0), (1000, 10))
    yield "cat of 100", only(lambda x: torch.cat([x] * 100), (100, 100))
    yield "stack", only(lambda x: torch.stack([x] * 10), (1000, 100))


def _looked_up(rows: int, count: int, dtype: torch.dtype, how: str) -> Callable[[], Parts]:
    def make() -> Parts:
        table = torch.randn(rows, 64, device="cuda").to(dtype).requires_grad_()
        generator = torch.Generator().manual_seed(0)
        at = torch.randint(0, rows, (count,), generator=generator).cuda()
        if how == "embedding":
            return passes(lambda t: functional.embedding(at, t), table)
        if how == "bag":
            offsets = torch.arange(0, count, 10, device="cuda")
            return passes(lambda t: functional.embedding_bag(at, t, offsets), table)
        if how == "index":
            return passes(lambda t: t[at], table)
        if how == "index_select":
            return passes(lambda t: t.index_select(0, at), table)
        wide = at[:, None].expand(-1, 64)
        return passes(lambda t: t.gather(0, wide), table)

    return make


def _written(rows: int, count: int, dtype: torch.dtype, how: str) -> Callable[[], Parts]:
    def make() -> Parts:
        table = torch.zeros(rows, 64, device="cuda", dtype=dtype)
        source = torch.randn(count, 64, device="cuda").to(dtype).requires_grad_()
        generator = torch.Generator().manual_seed(0)
        at = torch.randint(0, rows, (count,), generator=generator).cuda()
        wide = at[:, None].expand(-1, 64)
        return passes(
            {
                "index_put": lambda s: table.index_put((at,), s, accumulate=True),
                "set": lambda s: table.index_put((at,), s),
                "index_add": lambda s: table.index_add(0, at, s),
                "scatter_add": lambda s: table.scatter_add(0, wide, s),
                "scatter_reduce": lambda s: table.scatter_reduce(0, wide, s, "amax"),
            }[how],
            source,
        )

    return make


def _scaled_embedding() -> Parts:
    made = nn.Embedding(1000, 64, scale_grad_by_freq=True).cuda()
    at = torch.arange(4000, device="cuda") % 700
    return passes(made, at)


def _sparse_embedding() -> Parts:
    made = nn.Embedding(50000, 64, sparse=True).cuda()
    at = torch.arange(4000, device="cuda") % 700
    optimizer = torch.optim.SparseAdam(list(made.parameters()))
    return [*passes(made, at), optimizer.step]


# ---- Linear algebra and Fourier transforms ----


@family
def linear_algebra() -> Cases:
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "inv": torch.linalg.inv,
        "solve": lambda a: torch.linalg.solve(a, a),
        "lu": torch.linalg.lu_factor,
        "det": torch.linalg.det,
        "slogdet": torch.linalg.slogdet,
        "qr": torch.linalg.qr,
        "svd": torch.linalg.svd,
        "svdvals": torch.linalg.svdvals,
        "eigh": lambda a: torch.linalg.eigh(a + a.mT),
        "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mT),
        "eig": torch.linalg.eig,
        "cholesky": lambda a: torch.linalg.cholesky_ex(a @ a.mT),
        "cholesky_solve": lambda a: torch.cholesky_solve(a, torch.linalg.cholesky_ex(a @ a.mT)[0]),
        "cholesky_inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky_ex(a @ a.mT)[0]),
        "lstsq": lambda a: torch.linalg.lstsq(a, a),
        "pinv": torch.linalg.pinv,
        "matrix_exp": torch.linalg.matrix_exp,
        "matrix_power": lambda a: torch.linalg.matrix_power(a, 5),
        "matrix_norm 2": lambda a: torch.linalg.matrix_norm(a, 2),
        "matrix_rank": torch.linalg.matrix_rank,
        "cond": torch.linalg.cond,
        "triangular": lambda a: torch.linalg.solve_triangular(a.tril(), a, upper=False),
        "ldl": lambda a: torch.linalg.ldl_factor_ex(a + a.mT),
        "householder": lambda a: torch.linalg.householder_product(a, a[..., 0, :]),
    }
    for name, function in functions.items():
        for shape in (
            (4, 4),
            (64, 64),
            (512, 512),
            (1000, 1000),
            (32, 3, 3),
            (8, 64, 64),
            (2, 300, 300),
        ):
            for dtype in (torch.float32, torch.float64):
                if shape[-1] > 500 and name in ("eig", "svdvals", "cond", "matrix_rank"):
                    continue
                yield f"{name} {shape}, {short(dtype)}", only(function, shape, dtype=dtype)
    yield "lstsq tall", only(lambda a, b: torch.linalg.lstsq(a, b), (1000, 50), (1000, 3))
    yield "svd tall", only(lambda a: torch.linalg.svd(a, full_matrices=False), (2000, 100))
    yield "qr tall", only(torch.linalg.qr, (2000, 100))
    yield "svd_lowrank", only(lambda a: torch.svd_lowrank(a, 10), (500, 200))
    yield "lobpcg", only(lambda a: torch.lobpcg(a @ a.mT, k=3), (200, 200))


@family
def fourier() -> Cases:
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "fft": torch.fft.fft,
        "rfft": torch.fft.rfft,
        "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        "fft2": lambda x: torch.fft.fft2(x) if x.ndim > 1 else None,
        "rfft2": lambda x: torch.fft.rfft2(x) if x.ndim > 1 else None,
        "irfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x)) if x.ndim > 1 else None,
        "fftn": torch.fft.fftn,
        "stft": lambda x: (
            torch.stft(
                x.reshape(1, -1)[:, :20000],
                400,
                160,
                window=torch.ones(400, device="cuda"),
                return_complex=True,
            )
            if x.numel() > 20000
            else None
        ),
    }
    for name, function in functions.items():
        for shape in (
            (1024,),
            (1000,),
            (1009,),
            (65536,),
            (1_000_003,),
            (64, 1024),
            (16, 3, 224, 224),
            (8, 127),
        ):
            yield f"{name} {shape}", only(function, shape)


@family
def sparse() -> Cases:
    def product(form: str, dtype: torch.dtype) -> Callable[[], Parts]:
        def make() -> Parts:
            generator = torch.Generator().manual_seed(0)
            dense = torch.randn(500, 400, generator=generator)
            dense = (dense * (dense > 1)).to("cuda", dtype)
            left = dense.to_sparse() if form == "coo" else dense.to_sparse_csr()
            right = torch.randn(400, 64, device="cuda").to(dtype)
            return [lambda: left @ right, lambda: left.to_dense()]

        return make

    for form in ("coo", "csr"):
        for dtype in FLOATS:
            yield f"product {form}, {short(dtype)}", product(form, dtype)
    yield "to_sparse", only(lambda x: x.relu().to_sparse(), (500, 400))
    yield "to_sparse_csr", only(lambda x: x.relu().to_sparse_csr(), (500, 400))
    yield "coalesce", only(lambda x: (x.relu().to_sparse() + x.to_sparse()).coalesce(), (300, 200))


# ---- Optimizers ----


@family
def optimizers() -> Cases:
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop"),
        *("Rprop", "ASGD", "Adafactor", "Muon", "LBFGS"),
    ):
        for how in ("", "foreach", "for loop", "fused", "capturable"):
            yield f"{name} {how}".strip(), _optimizer(name, how)
    for foreach in (True, False):
        yield f"clip_grad_norm_, foreach {foreach}", _clipped(foreach)
    yield "GradScaler", _scaled


def _network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6))).cuda()


def _optimizer(name: str, how: str) -> Callable[[], Parts]:
    def make() -> Parts:
        network = _network()
        named: dict[str, Any] = {
            "": {},
            "foreach": {"foreach": True},
            "for loop": {"foreach": False},
            "fused": {"fused": True},
            "capturable": {"capturable": True},
        }[how]
        optimizer = getattr(torch.optim, name)(network.parameters(), **named)
        x = torch.randn(32, 256, device="cuda")

        def closure() -> Any:
            optimizer.zero_grad()
            loss = network(x).square().mean()
            loss.backward()
            return loss

        if name == "LBFGS":
            return [lambda: optimizer.step(closure)]
        closure()
        return [optimizer.step, optimizer.step, optimizer.zero_grad]

    return make


def _clipped(foreach: bool) -> Callable[[], Parts]:
    def make() -> Parts:
        network = _network()
        network(torch.randn(32, 256, device="cuda")).square().mean().backward()
        return [lambda: nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=foreach)]

    return make


def _scaled() -> Parts:
    network = _network()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(32, 256, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.float16):
            loss = network(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return [step, step]
