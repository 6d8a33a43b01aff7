"""Sweeps that show by which rule a library asks for workspaces."""
import json, random, sys, warnings
import torch
from torch import nn
sys.path.insert(0, "benchmarks/card")
from asked import requests
import shapes
from shapes import passes, layer, only
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
R = random.Random(0)
D = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
which, out = sys.argv[1], open(sys.argv[2], "a")
def put(name, about, parts):
    try: row = requests(*parts())
    except Exception as e: row = {"failed": f"{type(e).__name__}: {str(e)[:200]}"}
    print(json.dumps({"sweep": name, "about": about, "row": row}), file=out, flush=True)
def rnn():
    for i in range(420):
        kind = R.choice(["LSTM", "GRU", "RNN"]); dt = R.choice(["float32", "float16", "bfloat16"])
        hidden = R.choice([16, 32, 64, 100, 128, 200, 256, 512, 1024]); layers = R.choice([1, 1, 2, 3, 4]); bi = R.random() < .4
        n = R.choice([1, 2, 8, 16, 33, 64, 128]); t = R.choice([1, 2, 10, 50, 100, 128]); inp = R.choice([1, 16, 64, 100, 300, 512])
        drop = R.choice([0, 0, .2]) if layers > 1 else 0; train = R.random() < .75; tf32 = R.random() < .8
        def parts():
            torch.backends.cudnn.allow_tf32 = tf32
            m = getattr(nn, kind)(inp, hidden, layers, bidirectional=bi, dropout=drop).to("cuda", D[dt])
            x = torch.randn(t, n, inp, device="cuda").to(D[dt])
            if train: return passes(m, x.requires_grad_())
            def run():
                with torch.no_grad(): return m.eval()(x)
            return [run]
        put("rnn", dict(kind=kind, dtype=dt, hidden=hidden, layers=layers, bi=bi, n=n, t=t, inp=inp, drop=drop, train=train, tf32=tf32), parts)
def norm():
    for i in range(160):
        c = R.choice([3, 8, 16, 32, 33, 64, 96, 128, 256, 512, 1024, 2048]); n = R.choice([1, 2, 4, 7, 8, 16, 32, 64, 128]); h = R.choice([1, 2, 4, 7, 8, 14, 28, 32, 56])
        dt = R.choice(["float32", "float16", "bfloat16"]); dims = R.choice([2, 2, 2, 3])
        shape = (n, c, h, h) if dims == 2 else (min(n, 8), c, min(h, 8), min(h, 8), min(h, 8))
        mod = nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d
        amp = R.random() < .5
        def parts():
            m = mod(c).to("cuda"); 
            if not amp: m = m.to(D[dt])
            x = torch.randn(*shape, device="cuda").to(D[dt]).contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
            return passes(m, x.requires_grad_())
        put("norm", dict(shape=shape, dtype=dt, amp=amp), parts)
def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import torch.nn.functional as F
    for i in range(160):
        n = R.choice([1, 2, 3, 8]); h = R.choice([1, 2, 4, 8, 12]); g = R.choice([h, h, 1]) ; q = R.choice([1, 7, 64, 100, 128, 200, 512, 1000]); k = R.choice([q, q, q, 64, 333, 1024]); d = R.choice([32, 64, 72, 80, 96, 128, 256]); dv = R.choice([d, d, d, 64])
        dt = R.choice(["float16", "bfloat16"]); causal = R.random() < .4; mask = not causal and R.random() < .3; drop = R.choice([0, 0, 0, .1]); train = R.random() < .8; layout = R.choice(["bhsd", "bshd"])
        backend = R.choice(["cudnn", "cudnn", "any"])
        def parts():
            def make(heads, length, width):
                if layout == "bhsd": return torch.randn(n, heads, length, width, device="cuda").to(D[dt]).requires_grad_(train)
                return torch.randn(n, length, heads, width, device="cuda").to(D[dt]).transpose(1, 2).detach().requires_grad_(train)
            x = [make(h, q, d), make(g, k, d), make(g, k, dv)]
            named = dict(is_causal=causal, dropout_p=drop, enable_gqa=g != h)
            if mask: named["attn_mask"] = torch.randn(n, R.choice([1, h]), q, k, device="cuda").to(D[dt])
            def run(*x):
                if backend == "any": return F.scaled_dot_product_attention(*x, **named)
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(*x, **named)
            return passes(run, *x) if train else [lambda: run(*x)]
        put("attention", dict(n=n, h=h, g=g, q=q, k=k, d=d, dv=dv, dtype=dt, causal=causal, mask=mask, drop=drop, train=train, layout=layout, backend=backend), parts)
def fourier():
    torch.backends.cuda.cufft_plan_cache.max_size = 0
    sizes = [2, 8, 31, 64, 100, 127, 128, 256, 500, 509, 512, 1000, 1009, 1024, 2048, 4096, 8191, 8192, 10000, 16384, 32768, 65536, 100000, 100003, 131072, 262144, 524288, 1000000, 1048576]
    for n in sizes:
        for batch in (1, 2, 16, 100):
            if n * batch > 2**24: continue
            for kind in ("c2c", "r2c", "c2r"):
                for dt in ("float32", "float64"):
                    def parts():
                        if kind == "r2c": x = torch.randn(batch, n, device="cuda", dtype=D[dt]); return [lambda: torch.fft.rfft(x)]
                        x = torch.randn(batch, n if kind == "c2c" else n // 2 + 1, device="cuda", dtype=torch.complex64 if dt == "float32" else torch.complex128)
                        return [(lambda: torch.fft.fft(x)) if kind == "c2c" else (lambda: torch.fft.irfft(x, n=n))]
                    put("fft", dict(sizes=[n], batch=batch, kind=kind, dtype=dt), parts)
    for shape in ([8, 8], [64, 64], [100, 100], [127, 127], [224, 224], [256, 256], [512, 512], [1000, 1000], [1024, 1024], [64, 1009], [16, 16, 16], [64, 64, 64], [100, 100, 100], [128, 128, 128]):
        for batch in (1, 3, 16):
            if batch * torch.Size(shape).numel() > 2**24: continue
            for kind in ("c2c", "r2c", "c2r"):
                dims = tuple(range(1, len(shape) + 1))
                def parts():
                    if kind == "r2c": x = torch.randn(batch, *shape, device="cuda"); return [lambda: torch.fft.rfftn(x, dim=dims)]
                    if kind == "c2c": x = torch.randn(batch, *shape, device="cuda", dtype=torch.complex64); return [lambda: torch.fft.fftn(x, dim=dims)]
                    x = torch.randn(batch, *shape[:-1], shape[-1] // 2 + 1, device="cuda", dtype=torch.complex64)
                    return [lambda: torch.fft.irfftn(x, s=shape, dim=dims)]
                put("fft", dict(sizes=shape, batch=batch, kind=kind, dtype="float32"), parts)
def solver():
    fs = {"inv": torch.linalg.inv_ex, "lu": torch.linalg.lu_factor_ex, "qr": torch.linalg.qr, "svd": torch.linalg.svd, "svdvals": torch.linalg.svdvals, "eigh": lambda a: torch.linalg.eigh(a + a.mH), "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mH), "cholesky": lambda a: torch.linalg.cholesky_ex(a @ a.mH), "solve": lambda a: torch.linalg.solve_ex(a, a), "det": torch.linalg.det, "ldl": lambda a: torch.linalg.ldl_factor_ex(a + a.mH), "lstsq": lambda a: torch.linalg.lstsq(a, a[..., :1]), "eig": torch.linalg.eig, "cholesky_inverse": lambda a: torch.cholesky_inverse(torch.linalg.cholesky_ex(a @ a.mH)[0]), "orgqr": lambda a: torch.linalg.householder_product(a, a[..., 0, :].contiguous()), "ormqr": lambda a: torch.ormqr(a, a[..., 0, :].contiguous(), a), "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(a)[:2], a)}
    for name, f in fs.items():
        for shape in ((1, 1), (2, 2), (3, 3), (8, 8), (16, 16), (32, 32), (33, 33), (64, 64), (100, 100), (128, 128), (200, 200), (256, 256), (400, 400), (512, 512), (700, 700), (1024, 1024), (1500, 1500), (4, 8, 8), (2, 64, 64), (10, 33, 33), (100, 16, 16), (3, 200, 200), (0, 3, 3)):
            for dt in (torch.float32, torch.float64, torch.complex64):
                if name in ("svd", "svdvals", "eig", "eigh", "eigvalsh") and shape[-1] > 1024: continue
                if name == "eig" and shape[-1] > 256: continue
                put("solver", dict(name=name, shape=shape, dtype=str(dt)), only(f, shape, dtype=dt))
        if name in ("qr", "svd", "svdvals", "lstsq"):
            for shape in ((100, 20), (20, 100), (1000, 50), (50, 1000), (512, 511), (4, 100, 20), (2, 20, 100)):
                for dt in (torch.float32, torch.float64): put("solver", dict(name=name, shape=shape, dtype=str(dt)), only(f, shape, dtype=dt))
def others():
    import torch.nn.functional as F
    for n in (1, 2, 8, 32):
        for c in (5, 20, 100):
            for t in (10, 50, 120):
                for s in (3, 9):
                    def parts():
                        x = torch.randn(t, n, c, device="cuda").log_softmax(2).detach().requires_grad_()
                        target = torch.randint(1, c, (n * s,), dtype=torch.int32)
                        return passes(lambda x: F.ctc_loss(x, target, torch.full((n,), t, dtype=torch.int32), torch.full((n,), s, dtype=torch.int32)), x)
                    put("ctc", dict(n=n, c=c, t=t, s=s), parts)
    for m, k, c in ((100, 100, 16), (500, 400, 64), (1000, 1000, 1), (1000, 1000, 100), (5000, 300, 32)):
        for form in ("csr", "coo", "bsr", "csc"):
            for dt in ("float32", "float16", "float64"):
                for density in (.01, .1):
                    def parts():
                        g = torch.Generator().manual_seed(0)
                        a = torch.randn(m, k, generator=g); a = (a * (torch.rand(m, k, generator=g) < density)).to("cuda", D[dt])
                        s = {"csr": a.to_sparse_csr, "coo": a.to_sparse, "csc": a.to_sparse_csc, "bsr": lambda: a.to_sparse_bsr((4, 4))}[form]()
                        x = torch.randn(k, c, device="cuda").to(D[dt])
                        y = [lambda: s @ x, lambda: s @ x[:, 0]]
                        if form == "csr": y += [lambda: (s @ s.t().to_sparse_csr()), lambda: torch.sparse.sampled_addmm(s, x.new_ones(m, c), x.new_ones(c, k)), lambda: s + s]
                        return y
                    put("sparse", dict(m=m, k=k, c=c, form=form, dtype=dt, density=density), parts)
torch.cuda.init()
{"rnn": rnn, "norm": norm, "attention": attention, "fourier": fourier, "solver": solver, "others": others}[which]()
