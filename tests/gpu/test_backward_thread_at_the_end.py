"""What the thread of a backward pass frees after the region's code is no garbage."""

import torch


def run(device):
    weight = torch.ones(2**20, device=device, requires_grad=True)
    torch.autograd.grad(weight.exp().sum(), weight)


def test_what_a_backward_thread_still_frees_is_no_garbage(probe, cuda):
    """The thread drops its last reference up to 1 ms after the pass; no cycle holds the memory."""
    found = set()
    for _ in range(200):
        with probe.measure() as region:
            run(cuda)
        found.add((region.garbage_end_bytes, region.retained_bytes))
    assert found == {(0, 0)}
