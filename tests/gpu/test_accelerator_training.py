"""Training on an accelerator: graphs, gradients, optimiser states and libraries' workspaces."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture
def images(probe):
    """Return a batch of eight images."""
    return torch.randn(8, 3, 8, 8, device=probe.device)


@pytest.fixture
def linear_layers(probe):
    """Return a network that is large enough for libraries to allocate workspaces."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(512, 512), torch.nn.ReLU(inplace=True), torch.nn.Linear(512, 512)
    return torch.nn.Sequential(*layers).to(probe.device).eval()


@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_training_retains_nothing_and_does_not_grow(cka_memory, network, images):
    """Training retains nothing if a step before the region allocated the optimiser's state."""
    optimizer = torch.optim.AdamW(network.parameters())

    def step():
        optimizer.zero_grad()
        checkpoint(network, images, use_reentrant=False).square().mean().backward()
        optimizer.step()

    step()
    with cka_memory.measure() as region:
        for _ in region.batches([torch.zeros(8)] * 8):
            step()
        optimizer.zero_grad()  # otherwise the gradients of the last step would be retained
    assert region.peak_increase_bytes > 0


@pytest.mark.parametrize("kept_bytes", [0, 4096], ids=["clean", "leak"])
def test_growth_per_optimizer_step_is_exact(probe, network, images, kept_bytes):
    """Without a loader, growth is measured per optimizer step, after its state was allocated."""
    optimizer = torch.optim.AdamW(network.parameters())
    kept = []
    with probe.measure() as region, region.each_step():
        for _ in range(9):
            optimizer.zero_grad()
            with torch.autocast(probe.device.type, dtype=torch.bfloat16):
                loss = network(images).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(torch.empty(kept_bytes, dtype=torch.uint8, device=probe.device))
    assert len(region.timeline) == 9
    assert region.growth_bytes_per_batch == kept_bytes


@pytest.mark.max_level_mb(9)
def test_level_is_what_torch_calls_the_maximum_allocated(cka_memory, allocate):
    """The peak includes what was live before the region, like torch's ``max_memory_allocated``."""
    old = allocate(4 * 2**20)
    with cka_memory.measure() as region:
        allocate(2 * 2**20)
    if cka_memory.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocate(2 * 2**20)
        assert region.peak_bytes == torch.cuda.max_memory_allocated()
    assert region.peak_increase_bytes == 2 * 2**20
    del old


def test_first_step_retains_gradients_and_the_optimisers_state(probe, network, images):
    """Adam's first step retains the gradients and two averages; its step counts are on the CPU."""
    parameters = sum(parameter.nbytes for parameter in network.parameters())
    with probe.measure() as region:
        optimizer = torch.optim.Adam(network.parameters())
        network(images).sum().backward()
        optimizer.step()
    assert region.retained_bytes == 3 * parameters


def test_graph_retains_what_its_operators_saved(probe):
    """A graph retains a factor of the product and the result of the exponential, which it saved."""
    weight = torch.ones(1000, device=probe.device, requires_grad=True)
    with probe.measure() as region:
        factor = torch.ones(1000, device=probe.device)
        result = (weight * factor).exp()
        loss = result.sum()
        del factor, result
    assert region.retained_bytes == 4000 + 4000 + loss.nbytes


def test_tensors_of_a_failed_backward_pass_are_not_retained(probe, fail_late):
    """Torch's backward thread references an error longer than the
    caller; its tensors do not count.
    """
    with probe.measure() as region:
        fail_late(probe.device)
    assert region.retained_bytes == 0
    assert region.peak_increase_bytes > 4000


def test_library_workspaces_are_not_retained(probe, linear_layers):
    """The workspace that a library allocates in its first region is reported as one-time bytes."""
    batch = torch.ones(64, 512, device=probe.device)
    with probe.measure() as region, torch.no_grad():
        linear_layers(batch)
    assert region.retained_bytes == 0
    if probe.device.type == "cuda":
        assert region.one_time_bytes is not None


def test_gradients_allocated_by_the_backward_thread_are_retained(probe, linear_layers):
    """Gradients have exactly the parameters' bytes, and each is named by an expression."""
    batch = torch.ones(64, 512, device=probe.device)
    with probe.measure() as region:
        linear_layers(batch).sum().backward()
    assert region.retained_bytes == sum(p.nbytes for p in linear_layers.parameters())
    assert {holding.held_by.split(" in ")[0] for holding in region.retained} <= {
        f"linear_layers[{index}].{name}.grad" for index in (0, 2) for name in ("weight", "bias")
    }
