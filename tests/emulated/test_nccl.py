"""NCCL on emulated devices: order, types, errors, and processes that end."""

import os
import signal

import pytest
import torch

ORDERS = """
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
small = torch.full((1000,), rank + 1.0, device="cuda")
large = torch.full((10**6,), rank + 1.0, device="cuda")
token = torch.zeros(1, device="cuda")
for group in (first, second):  # the first call makes a communicator, and must be in order
    dist.all_reduce(token, group=group)
    (dist.recv if rank else dist.send)(token, 1 - rank, group=group)
calls = [(first, small), (second, large)]
works = [dist.all_reduce(t, group=g, async_op=True) for g, t in calls[:: 1 - 2 * rank]]
for work in works:
    work.wait()
print("reduced", small[-1].item(), large[-1].item())

received = torch.empty(10**6, device="cuda")
sending = dist.isend(large + rank, 1 - rank, group=(first, second)[rank])
receiving = dist.irecv(received, 1 - rank, group=(second, first)[rank])
sending.wait(), receiving.wait()
print("received", received[-1].item())
"""


def test_calls_that_wait_for_each_other_in_a_circle_go_on(nccl):
    """Ranks that use two communicators in another order than each other do not hang on a card."""
    runs = nccl(ORDERS)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == "reduced 3.0 3.0\nreceived 4.0\n"
    assert runs[1].stdout == "reduced 3.0 3.0\nreceived 3.0\n"


MESSAGES = """
count = 3_000_000
received = torch.empty(count, device="cuda")
operations = [
    dist.P2POp(dist.isend, torch.full((count,), 10.0 + rank, device="cuda"), 1 - rank),
    dist.P2POp(dist.irecv, received, 1 - rank),
]
for work in dist.batch_isend_irecv(operations):
    work.wait()
print(received.unique().tolist())
parts = [torch.arange(3.0, device="cuda") + 10 * rank, torch.arange(2.0, device="cuda") + 10 * rank]
found = [torch.empty(len(parts[rank]), device="cuda") for _ in range(2)]
dist.all_to_all(found, parts)
print([part.tolist() for part in found])
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank, "list": ["a"] * 20_000 * rank})
print([len(each["list"]) for each in objects])
empty = torch.empty(0, device="cuda")
dist.all_reduce(empty)
swapped = torch.tensor([float(rank)], device="cuda")
dist.broadcast(swapped, 1, group=dist.new_group([1, 0], use_local_synchronization=True))
print(swapped.item())
"""


def test_messages_larger_than_the_buffers_between_ranks_arrive(nccl):
    """Messages in both directions move together, in parts; parts of a list may differ in size."""
    runs = nccl(MESSAGES)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout.splitlines()[:2] == ["[11.0]", "[[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]"]
    assert runs[1].stdout.splitlines()[:2] == ["[10.0]", "[[0.0, 1.0], [10.0, 11.0]]"]
    assert (
        runs[0].stdout.splitlines()[2:] == runs[1].stdout.splitlines()[2:] == ["[0, 20000]", "1.0"]
    )


LATE = """
token = torch.zeros(1, device="cuda")
dist.all_reduce(token)
mark = sys.argv[3] + "-given"
if rank == 0:
    works = [dist.all_reduce(torch.ones(2, device="cuda"), async_op=True) for _ in range(40)]
    open(mark, "w").close()
else:
    deadline = time.monotonic() + 60
    while not os.path.exists(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.path.exists(mark), "40 calls wait for 3 seconds each"
    works = [dist.all_reduce(torch.ones(2, device="cuda"), async_op=True) for _ in range(40)]
for work in works:
    work.wait()
dist.all_reduce(token)
print(token.item())
"""


@pytest.mark.slow
def test_only_the_first_call_waits_for_a_rank_that_does_not_come(nccl):
    """The calls behind one that has waited for 3 seconds return at once, as on a card."""
    runs = nccl(f"import time\n{LATE}")
    assert [run.stdout for run in runs] == ["0.0\n"] * 2, runs[0].stderr + runs[1].stderr


def test_ranks_that_call_something_else_get_an_error_that_names_both_calls(nccl):
    """On a card such ranks hang, or overwrite memory."""
    runs = nccl("dist.all_reduce(torch.ones(4 + rank, device='cuda'))")
    for own, other in ((0, 1), (1, 0)):
        assert runs[own].returncode == 1
        assert (
            f"the ranks call different collectives: rank {own} calls ncclAllReduce of {4 + own} "
            f"float32 (sum), but rank {other} calls ncclAllReduce of {4 + other} float32 (sum)"
        ) in runs[own].stderr


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise ValueError('of rank 1')"])
def test_rank_that_ends_ends_the_others(nccl, end):
    """Who waits for a rank that has ended is told so within a second; nothing is left of them."""
    before = set(os.listdir("/dev/shm"))
    code = f"""
dist.all_reduce(torch.ones(4, device="cuda"))
if rank == 1:
    {end}
dist.all_reduce(torch.ones(4, device="cuda"))
"""
    first, second = nccl(code)
    assert second.returncode in (1, -signal.SIGKILL)
    assert first.returncode == 1
    assert ") has ended, while rank 0 waited for it in ncclAllReduce of 4 float32" in first.stderr
    assert set(os.listdir("/dev/shm")) <= before


SAME_DEVICE = """
dist.destroy_process_group()
if set_by:
    os.environ[set_by] = str(rank)  # as torchrun does with the number of a node
torch.cuda.set_device(0)
given = dict(init_method=f"file://{sys.argv[3]}-same", device_id=torch.device("cuda:0"))
dist.init_process_group("nccl", rank=rank, world_size=ranks, **given)
x = torch.full((4,), rank + 1.0, device="cuda")
dist.all_reduce(x)
print(x[0].item())
"""


@pytest.mark.parametrize("set_by", ["GROUP_RANK", "NCCL_HOSTID"])
def test_ranks_of_different_nodes_use_devices_of_the_same_number(nccl, set_by):
    """``torchrun --nnodes 2``, started twice on a machine, gives each node its own devices."""
    runs = nccl(f"set_by = {set_by!r}{SAME_DEVICE}")
    assert [run.stdout for run in runs] == ["3.0\n"] * 2, runs[0].stderr


def test_two_ranks_of_a_node_on_one_device_are_refused(nccl):
    """NCCL refuses them, too; the error names both ranks and what to call."""
    runs = nccl(f"set_by = None{SAME_DEVICE}")
    assert [run.returncode for run in runs] == [1, 1]
    for run in runs:
        assert (
            "duplicate GPU: rank 0 and rank 1 both use device 0; call torch.cuda.set_" in run.stderr
        )


NAN = """
import emulated_cuda, sys
emulated_cuda.load("a100")
import torch
import torch.distributed as dist

dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def broadcast(dtype, bits):
    tensor = torch.ones(5, device="cuda").to(dtype)
    tensor.view(torch.uint8)[-dtype.itemsize :] = bits
    try:
        dist.broadcast(tensor, 0)
    except RuntimeError as error:
        return str(error).partition("CUDA error: ")[2].partition(chr(10))[0]
    return tensor.view(torch.uint8)[-1].item()

floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
for dtype in (*floats, torch.float8_e4m3fn, torch.float8_e5m2):
    print(broadcast(dtype, 255), broadcast(dtype, 0))
print(broadcast(torch.int32, 255))
dist.all_reduce(x := torch.ones(3, device="cuda"))
print(x.tolist())
"""


@pytest.mark.slow
def test_nan_check_of_torch_finds_what_would_be_sent(python, tmp_path):
    """The kernel that looks for NaN runs for each type that has NaN, and makes no value unknown."""
    settings = {"TORCH_NCCL_NAN_CHECK": "1", "TORCH_DIST_USE_NCCL2": "0"}
    # The device must be there when torch registers the kernel, so this is a new interpreter.
    done = python("-c", NAN, str(tmp_path / "store"), **settings)
    found = (
        "device-side assert triggered: element 4 of 5 of a tensor to send is NaN (checked "
        "because TORCH_NCCL_NAN_CHECK is set) 0\n"
    )
    assert done.stdout == found * 6 + "255\n[1.0, 1.0, 1.0]\n", done.stderr


STALE = """
from emulated_cuda.values import staleness

stale = torch.ones(4, device="cuda")
staleness.mark(stale, "the values were not computed")
dist.broadcast(stale if rank else torch.full((4,), 5.0, device="cuda"), 0)
if rank:
    print(stale.tolist())
    staleness.mark(stale, "the values were not computed")
    dist.send(torch.ones(4, device="cuda"), 0)
    dist.all_reduce(stale)
else:
    received = torch.empty(4, device="cuda")
    dist.recv(received, 1)
    print(received.tolist())
"""


def test_value_that_was_not_computed_is_not_sent(nccl):
    """What a rank receives is known, so the rank that would send an unknown value raises."""
    first, second = nccl(STALE)
    assert (first.returncode, first.stdout) == (0, "[1.0, 1.0, 1.0, 1.0]\n")
    assert (second.returncode, second.stdout) == (1, "[5.0, 5.0, 5.0, 5.0]\n")
    assert "the values were not computed" in second.stderr


def test_without_values_short_messages_are_moved_and_large_memory_is_not_touched(nccl):
    """Objects and sizes must arrive, because programs depend on them."""
    code = """
import resource
objects = [None] * 2
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
large = torch.empty(2**30, device="cuda")
dist.all_reduce(large)
parts = torch.empty(2**31, device="cuda")
dist.all_gather_into_tensor(parts, large)
assert torch.cuda.memory_allocated() >= 12 * 2**30
grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown_kib < 100 * 1024)
"""
    assert [run.stdout.splitlines()[-1] for run in nccl(code, values="off")] == ["True"] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_values_ddp_finds_equal_models(nccl, ranks):
    """DDP gathers the numbers of parameters in 8 bytes for each rank, and reads them back."""
    code = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
model(torch.randn(4, 8, device="cuda")).sum().backward()
mine = torch.tensor([7 + rank], device="cuda")
all = [torch.empty_like(mine) for _ in range(ranks)]
dist.all_gather(all, mine)
known = [one.item() for one in all]
computed = torch.ones(1, dtype=torch.int64, device="cuda") * 3
dist.all_gather(all, computed)
print(known, [one.item() for one in all])
"""
    runs = nccl(code, ranks, values="off")
    assert [run.stdout.splitlines()[-1] for run in runs] == [
        f"{[7, 8][:ranks]} {[0, 0][:ranks]}"
    ] * ranks


def test_without_values_sizes_arrive_where_they_are_not_known(nccl):
    """A rank that sends nothing itself reads a size that another sent, if that one knew it."""
    code = """
def sent(value, send):
    number = value() if rank == 0 else torch.empty(1, dtype=torch.int64, device="cuda")
    send(number)
    return number.item()

def known():
    return torch.tensor([41], device="cuda")

def computed():
    return torch.full((1,), 40, device="cuda") + 1

def over_the_wire(number):
    dist.send(number, 1) if rank == 0 else dist.recv(number, 0)

def changed_after(number):
    dist.broadcast(number, 0)
    number.add_(1)

def sum_of(number):
    dist.all_reduce(number)
    return number.item()

ways = [lambda number: dist.broadcast(number, 0), over_the_wire, changed_after]
print([[sent(value, way) for way in ways] for value in (known, computed)])
print(sum_of(known()), sum_of(known() if rank else computed()))
"""
    for run in nccl(code, values="off"):
        assert run.stdout.splitlines()[-2:] == ["[[41, 41, 0], [0, 0, 0]]", "82 0"], run.stderr


ONE_PROCESS = """
import emulated_cuda
emulated_cuda.load("a100", devices=2)
import torch
import torch.cuda.nccl

model, inputs = torch.nn.Linear(4, 3), torch.randn(6, 4)
copy = torch.nn.Linear(4, 3).cuda()
copy.load_state_dict(model.state_dict())
outputs = torch.nn.DataParallel(copy, device_ids=[0, 1])(inputs.cuda())
outputs.square().mean().backward()
model(inputs).square().mean().backward()
torch.testing.assert_close(outputs.cpu(), model(inputs))
torch.testing.assert_close(copy.weight.grad.cpu(), model.weight.grad)
tensors = [torch.full((3,), index + 1.0, device=f"cuda:{index}") for index in range(2)]
torch.cuda.nccl.all_reduce(tensors)
print([tensor.tolist() for tensor in tensors], torch.cuda.nccl.version() >= (2, 20))
"""


def test_devices_of_one_process_reduce_together(python):
    """DataParallel makes a communicator for each device of the process, in one call."""
    done = python("-c", ONE_PROCESS, forked=True)
    assert done.stdout == "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]] True\n", done.stderr


SHRUNK = """
dist.destroy_process_group()
store = f"file://{sys.argv[3]}-with-device"
device = torch.device("cuda", rank)
dist.init_process_group("nccl", store, rank=rank, world_size=ranks, device_id=device)
reduced = torch.ones(3, device="cuda")
dist.all_reduce(reduced)
if rank == 2:
    os._exit(0)
try:
    dist.all_reduce(torch.ones(3, device="cuda"))
    torch.cuda.synchronize()
except Exception as error:
    print("rank 2 of 3" in str(error), flush=True)
shrunk = dist.shrink_group([2], shrink_flags=1)
left = torch.ones(3, device="cuda")
dist.all_reduce(left, group=shrunk)
print(reduced[0].item(), left[0].item(), dist.get_world_size(), flush=True)
os._exit(0)
"""
CLASSIC = {
    "TORCH_DIST_USE_NCCL2": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # the watchdog sleeps four times as long
}
HAS_SHRINK = hasattr(torch.distributed, "shrink_group")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SHRINK, reason="this version of torch cannot shrink process groups")
def test_communicator_whose_rank_has_ended_can_be_shrunk(nccl):
    """The ranks that are left abort what waits for the ended rank, and go on without it."""
    runs = nccl(SHRUNK, ranks=3, **CLASSIC)
    assert [run.stdout for run in runs[:2]] == ["True\n3.0 2.0 2\n"] * 2, runs[0].stderr


ABORTED = """
token = torch.ones(4, device="cuda")
dist.all_reduce(token)
if rank == 0:
    dist.all_reduce(token)
    dist.group.WORLD._get_backend(torch.device("cuda", rank)).abort()
    print(len(token.tolist()), flush=True)
    os._exit(0)
"""


def test_program_that_handles_errors_aborts_and_goes_on(nccl):
    """With PyTorch's error handling off, neither the call nor what waits for it raises before."""
    assert nccl(ABORTED, **CLASSIC)[0].stdout == "4\n"


ROOT = """
token = torch.ones(4, device="cuda")
dist.all_reduce(token)
if rank == 0:
    dist.broadcast(token, 0)
    print(token.tolist(), flush=True)
    dist.all_reduce(token)
"""


def test_root_of_a_short_broadcast_does_not_need_the_others(nccl):
    """What fits in the buffers of a card leaves the root; its next call raises."""
    first = nccl(ROOT)[0]
    assert (first.returncode, first.stdout) == (1, "[2.0, 2.0, 2.0, 2.0]\n")
    assert "while rank 0 waited for it in ncclAllReduce of 4 float32" in first.stderr


SUSPENDED = """
total = torch.ones(3, device="cuda")
dist.all_reduce(total)
backend = dist.group.WORLD._get_backend(torch.device("cuda", rank))
backend.suspend()
suspended = backend.memory_stats()["suspended"]
backend.resume()
print(suspended, backend.memory_stats()["suspended"], backend.memory_stats()["total"])
dist.all_reduce(total)
print(total[0].item())
"""
HAS_SUSPEND = hasattr(torch.distributed.ProcessGroupNCCL, "suspend")


@pytest.mark.skipif(not HAS_SUSPEND, reason="this version of torch cannot suspend communicators")
def test_communicator_can_be_suspended_and_resumed(nccl):
    """A suspended communicator says so, and takes no memory of the device at any time."""
    runs = nccl(SUSPENDED, **CLASSIC)
    assert [run.stdout for run in runs] == ["1 0 0\n4.0\n"] * 2, runs[0].stderr


CAPTURED = """
total = torch.ones(3, device="cuda")
dist.all_reduce(total)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    total += 1
    dist.all_reduce(total)
    (dist.recv if rank else dist.send)(total, 1 - rank)
print(total[0].item())
graph.replay()
print(total[0].item())
graph.replay()
print(total[0].item())
"""


def test_collective_in_a_cuda_graph_is_done_at_each_replay(nccl):
    """A capture changes no value, and each replay makes the calls in their order."""
    runs = nccl(CAPTURED)
    assert [run.stdout for run in runs] == ["2.0\n6.0\n14.0\n"] * 2, runs[0].stderr
