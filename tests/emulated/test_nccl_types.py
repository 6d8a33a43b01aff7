"""Reductions of every type by NCCL on emulated devices."""

TYPES = """
def of_rank(dtype, rank):
    values = torch.tensor([1.5, -2.25, 0.0, 3.0, 1e-3, 7.0, 60.0, 1e-7]) * (rank + 1)
    return values.to(dtype)

def expected(dtype, op):
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    both = torch.stack([of_rank(dtype, r).to(wide) for r in range(ranks)])
    if op == dist.ReduceOp.AVG:
        rounding = None if dtype.is_floating_point else "trunc"
        return both.sum(0).div(ranks, rounding_mode=rounding).to(dtype)
    return {
        dist.ReduceOp.SUM: both.sum(0), dist.ReduceOp.PRODUCT: both.prod(0),
        dist.ReduceOp.MAX: both.amax(0), dist.ReduceOp.MIN: both.amin(0),
    }[op].to(dtype)

R = dist.ReduceOp
floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
integers = torch.int8, torch.int32, torch.int64
for dtype in (*floats, *integers):
    for op in (R.SUM, R.PRODUCT, R.MAX, R.MIN, R.AVG):
        own = of_rank(dtype, rank).cuda()
        dist.all_reduce(own, op)
        assert torch.equal(own.cpu(), expected(dtype, op)), (dtype, op, own, expected(dtype, op))
scaled = of_rank(torch.float32, rank).cuda()
dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
assert torch.equal(scaled.cpu(), sum(of_rank(torch.float32, r) * 0.5 for r in range(ranks)))
large = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
own = (large * (rank + 1)).cuda()
dist.all_reduce(own)
assert torch.equal(own.cpu(), sum((large * (r + 1) for r in range(ranks)), torch.zeros(1)))
print("all equal")
"""


def test_reductions_of_every_type_are_those_of_the_cpu(nccl):
    """Three ranks reduce in the order of the ranks; half precision is rounded once."""
    runs = nccl(TYPES, ranks=3)
    assert [run.stdout for run in runs] == ["all equal\n"] * 3, runs[0].stderr[-2000:]


FLOAT8 = """
def of_rank(dtype, rank):  # every number, beside every other of the other ranks
    bits = torch.arange(256, dtype=torch.uint8).repeat(256)
    return (bits if rank == 0 else bits.view(256, 256).T.reshape(-1)).contiguous().view(dtype)

R = dist.ReduceOp
both_nan = lambda a, b: a.float().isnan() & b.float().isnan()
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    first, second = (of_rank(dtype, each).float() for each in range(2))
    most = torch.finfo(dtype).max
    pairs = torch.stack([first, second])
    cases = {
        R.SUM: first + second, R.PRODUCT: first * second, R.AVG: (first + second) / 2,
        R.MAX: pairs.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(0),
        R.MIN: pairs.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(0),
    }
    for op, wide in cases.items():
        own = of_rank(dtype, rank).cuda()
        dist.all_reduce(own, op)
        found, expected = own.cpu(), wide.clamp(-most, most).to(dtype)
        same = found.view(torch.uint8) == expected.view(torch.uint8)
        is_zero = (found.float() == 0) & (expected.float() == 0)  # of either sign
        has_nan = pairs.isnan().any(0) if op in (R.MAX, R.MIN) else torch.zeros(1).bool()
        assert (same | is_zero | has_nan | both_nan(found, expected)).all(), (dtype, op)
    part = torch.empty(2, device="cuda").to(dtype)
    dist.reduce_scatter_tensor(part, torch.full((4,), 1.5 + rank, device="cuda").to(dtype))
    assert part.float().tolist() == [4.0, 4.0], part
print("all equal")
"""


def test_reductions_of_float8_are_those_of_float32_rounded_once(nccl):
    """What is too large becomes the largest number, as on cards; all pairs of numbers are tried."""
    runs = nccl(FLOAT8)
    assert [run.stdout for run in runs] == ["all equal\n"] * 2, runs[0].stderr[-2000:]
