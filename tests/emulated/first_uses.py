"""Uses each feature once, each in a process forked before anything was used on the device.

Prints what a region around the use retained: the feature, bytes on the host, on the device, and
what torch keeps once on the device, as on a card.
"""

import copy
import gc
import io
import os
import sys
from collections.abc import Callable

import emulated_cuda

VALUES = sys.argv[1] == "on"
emulated_cuda.load("a100", values=VALUES)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812

from pytest_cka_memory import MemoryProbe  # noqa: E402

FEATURES: dict[str, Callable[[torch.Tensor], object]] = {}


def feature(use: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    FEATURES[use.__name__] = use
    return use


@feature
def optimizers(x):
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS):
        parameter = torch.nn.Parameter(x.clone())
        parameter.grad = torch.ones_like(x)
        kind([parameter], lr=0.1).step(parameter.sum)


@feature
def rng(x):
    torch.manual_seed(1)
    torch.randn_like(x)
    torch.cuda.get_rng_state()


@feature
def generator(x):
    torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


@feature
def autocast(x):
    with torch.autocast("cuda", dtype=torch.float16):
        x @ x


@feature
def scaler(x):
    s = torch.amp.GradScaler("cuda")
    p = torch.nn.Parameter(x.clone())
    o = torch.optim.SGD([p], lr=0.1)
    s.scale(p.sum()).backward()
    s.step(o)
    s.update()


@feature
def streams(x):
    s = torch.cuda.Stream()
    e = torch.cuda.Event(enable_timing=True)
    f = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(s):
        e.record()
        x + 1
        f.record()
    f.synchronize()
    e.elapsed_time(f)
    torch.cuda.current_stream().wait_stream(s)


@feature
def graph(x):
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        x * 2
    g.replay()


@feature
def fft(x):
    torch.fft.rfft2(x)
    torch.fft.fft(x)


@feature
def sparse(x):
    s = x.to_sparse()
    s @ x


@feature
def csr(x):
    s = x.to_sparse_csr()
    s @ x


@feature
def conv(x):
    torch.nn.Conv2d(1, 2, 3).cuda()(x[None, None]).sum().backward()


@feature
def attention(x):
    q = x.half()[None, None].requires_grad_()
    F.scaled_dot_product_attention(q, q, q).sum().backward()


@feature
def dropout(x):
    F.dropout(x, 0.5)


@feature
def pinned(x):
    y = torch.ones(8, 8).pin_memory()
    y.cuda(non_blocking=True)


@feature
def to_cpu(x):
    x.to("cpu", non_blocking=True)
    torch.cuda.synchronize()


@feature
def checkpoint(x):
    from torch.utils.checkpoint import checkpoint

    checkpoint(
        lambda y: y.sin().cos(), x.clone().requires_grad_(), use_reentrant=False
    ).sum().backward()


@feature
def functions(x):
    torch.func.vmap(torch.func.grad(lambda y: (y * y).sum()))(x)


@feature
def foreach(x):
    torch._foreach_add([x, x], 1)
    torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0)


@feature
def loader(x):
    for b in torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 4)), 2, pin_memory=True
    ):
        b[0].cuda()


@feature
def matmul(x):
    x @ x


@feature
def linear_backward(x):
    torch.nn.Linear(8, 8).cuda()(x).sum().backward()


@feature
def bn(x):
    torch.nn.BatchNorm1d(8).cuda()(x).sum().backward()


@feature
def lstm(x):
    torch.nn.LSTM(8, 8).cuda()(x)[0].sum().backward()


@feature
def embedding(x):
    torch.nn.Embedding(8, 4).cuda()(torch.arange(4, device="cuda")).sum().backward()


@feature
def transformer(x):
    torch.nn.TransformerEncoderLayer(8, 2, 16).cuda()(x).sum().backward()


@feature
def item(x):
    x.sum().item()
    x.tolist()
    bool((x > 0).any())
    x.nonzero()
    repr(x)


@feature
def index(x):
    x[x > 0]
    x.sort()
    x.topk(2)
    x.unique()
    x.cumsum(0)
    x[[1, 2]]


@feature
def dtypes(x):
    for d in (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.int8,
        torch.bool,
        torch.float8_e4m3fn,
    ):
        x.to(d).to(torch.float32)


@feature
def loss(x):
    F.cross_entropy(x.clone().requires_grad_(), torch.arange(8, device="cuda")).backward()


@feature
def quantized(x):
    torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


@feature
def compiled(x):
    torch.compile(lambda y: (y.sin() + 1).sum(0))(x)


@feature
def triton(x):
    __import__("triton")


@feature
def saved(x):
    f = io.BytesIO()
    torch.save(x, f)
    f.seek(0)
    torch.load(f, map_location="cuda")


@feature
def deepcopy(x):
    copy.deepcopy(x)


@feature
def numpy(x):
    torch.from_numpy(x.cpu().numpy()).cuda()


@feature
def histogram(x):
    torch.histc(x)
    torch.bincount(torch.arange(3, device="cuda"))
    torch.multinomial(x.abs(), 2)


def use(name: str) -> None:
    probe = MemoryProbe("emulate:cuda:a100")
    x = torch.ones(8, 8, device=probe.device)
    with probe.measure() as region:
        FEATURES[name](x)
    figures = region.host_retained_bytes, region.retained_bytes, region.record.one_time_bytes
    print(name, *figures, flush=True)


gc.collect()
gc.freeze()  # the modules of torch, whose pages each child would copy
for name in FEATURES:
    child = os.fork()
    if not child:
        try:
            use(name)
        except BaseException as error:
            if not VALUES and "is not supported by the emulated device" in str(error):
                os._exit(0)  # such as cuFFT, which nothing computes then
            print(name, "failed:", repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
