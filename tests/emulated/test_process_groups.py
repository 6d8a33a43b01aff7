"""Process groups of NCCL and of Gloo compute on emulated devices.

The same script runs with both backends.
"""

import pytest

COLLECTIVES = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

group = dist.new_group(backend=sys.argv[5].rpartition(":")[2])

def tensor(*values):
    return torch.tensor([float(value) for value in values], device="cuda")

def filled(function, *shapes):
    results = [tensor(*[-1] * shape) for shape in shapes]
    function(*results)
    return [value for result in results for value in result.tolist()]

def check(name, result, *of_ranks):
    print(f"{name} {rank}" if result == of_ranks[rank] else f"{name} {rank}: {result}")

def after(function, *values):
    changed = tensor(*values) * 1
    function(changed)
    return (changed + 1).tolist()

def swap(received):
    sending = dist.isend(tensor(rank), 1 - rank, group=group)
    dist.recv(received, 1 - rank, group=group)
    sending.wait()

def own(start):
    return tensor(start + rank), tensor(start + rank + 2)

check("all_reduce", after(lambda t: dist.all_reduce(t, group=group), rank, 1), [2, 3], [2, 3])
check("broadcast", after(lambda t: dist.broadcast(t, 1, group=group), rank + 4), [6], [6])
check("reduce", after(lambda t: dist.reduce(t, 0, group=group), rank + 4)[: 1 - rank], [10], [])
check("send and recv", filled(swap, 1), [1], [0])
check("all_gather", filled(lambda *t: dist.all_gather(list(t), tensor(rank), group=group), 1, 1),
      [0, 1], [0, 1])
check("all_gather_into_tensor",
      filled(lambda t: dist.all_gather_into_tensor(t, tensor(rank), group=group), 2),
      [0, 1], [0, 1])
check("reduce_scatter",
      filled(lambda t: dist.reduce_scatter(t, list(own(1)), group=group), 1), [3], [7])
check("reduce_scatter_tensor",
      filled(lambda t: dist.reduce_scatter_tensor(t, torch.cat(own(1)), group=group), 1), [3], [7])
check("gather", filled(lambda *t: dist.gather(tensor(rank), list(t) or None, 0, group=group),
      *[1, 1][2 * rank :]), [0, 1], [])
check("scatter", filled(lambda t: dist.scatter(
      t, [tensor(4), tensor(5)] if rank == 0 else None, 0, group=group), 1), [4], [5])
check("all_to_all_single",
      filled(lambda t: dist.all_to_all_single(t, torch.cat(own(1)), group=group), 2),
      [1, 2], [3, 4])
check("barrier", dist.barrier(group=group), None, None)

def trained(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model

torch.manual_seed(0)
layer, inputs = nn.Linear(4, 2), torch.randn(6, 4)
state = {name: value.clone() for name, value in layer.state_dict().items()}
expected = trained(layer, inputs).weight
mine = inputs[rank * 3 :][:3].cuda()

copy = nn.Linear(4, 2).cuda()
copy.load_state_dict(state)
parallel = nn.parallel.DistributedDataParallel(copy, device_ids=[rank], process_group=group)
weight = trained(parallel, mine).module.weight.cpu()
check("DistributedDataParallel", torch.allclose(weight, expected), True, True)

copy = nn.Linear(4, 2).cuda()
copy.load_state_dict(state)
mesh = init_device_mesh("cuda", (2,))
weight = trained(fully_shard(copy, mesh=mesh), mine).weight
check("fully_shard", torch.allclose(weight.full_tensor().cpu(), expected), True, True)
dist.barrier()
dist.destroy_process_group()
"""
NAMES = (
    *("all_reduce", "broadcast", "reduce", "send and recv", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "all_to_all_single"),
    *("barrier", "DistributedDataParallel", "fully_shard"),
)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:gloo"])
def test_collectives_compute_on_devices(nccl, backend):
    """Two ranks, each with a device of its own; two forms of training equal one process."""
    for rank, run in enumerate(nccl(COLLECTIVES, backend=backend)):
        assert run.returncode == 0, run.stderr
        lines = [line for line in run.stdout.splitlines() if not line.startswith("[Gloo]")]
        assert lines == [f"{name} {rank}" for name in NAMES]
