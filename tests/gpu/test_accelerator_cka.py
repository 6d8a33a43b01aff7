"""The bundled CKA library on an accelerator."""

import pytest
import torch

from cka import CKA
from pytest_cka_memory import measure_memory_retention
from pytest_cka_memory.units import MB

# A similarity of constant features is NaN, and features on the emulated device are zeros or stale.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::cka.CKAWarning")]


def test_first_cka_run_retains_nothing(probe):
    """The first run of CKA retains nothing: workspaces that
    libraries allocate once do not count.
    """
    layers = torch.nn.Linear(512, 512), torch.nn.ReLU(inplace=True), torch.nn.Linear(512, 512)
    network = torch.nn.Sequential(*layers).to(probe.device).eval()
    loader = torch.utils.data.DataLoader(torch.randn(256, 512), batch_size=64)

    def compare():
        with CKA(network, network, device=probe.device) as cka:
            cka.compare(loader, progress=False)

    _, peak_mb, retained_mb = measure_memory_retention(compare)
    assert retained_mb == 0.0
    assert peak_mb > 0.0


@pytest.mark.zero_retention
@pytest.mark.flat_per_batch
def test_comparison_of_all_layers_retains_nothing_per_batch(cka_memory, network):
    """A comparison of all layers returns a matrix on the CPU and retains nothing on the device."""
    loader = torch.utils.data.DataLoader(torch.randn(48, 3, 8, 8), batch_size=8)
    with cka_memory.measure() as region, CKA(network.eval(), device=cka_memory.device) as cka:
        result = cka.compare(region.batches(loader), progress=False)
    assert result.matrix.device.type == "cpu"


@pytest.mark.parametrize("is_there", [True, False], ids=["model-on-it", "device-named"])
def test_cka_runs_on_the_device_of_the_model_or_the_named_one(probe, network, is_there):
    """A device can be named without an index, and CKA moves the model back afterwards."""
    device = probe.device if is_there else torch.device("cpu")
    network = network.eval().to(device)
    ran_on = set()
    network.register_forward_hook(lambda module, args, output: ran_on.add(output.device))
    cka = CKA(network, device=None if is_there else probe.device.type)
    cka.compare([torch.randn(8, 3, 8, 8)] * 2, progress=False)
    assert ran_on == {probe.device}
    assert {parameter.device for parameter in network.parameters()} == {device}


def test_cka_that_runs_out_of_memory_retains_nothing(probe, limit_reserve):
    """If CKA runs out of memory, its hooks are removed and its Gram matrices are freed."""
    network = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(4))).eval()
    entered = []
    network[0].register_forward_pre_hook(lambda module, args: entered.append(args[0].device))
    loader = torch.utils.data.DataLoader(torch.zeros(64, 65536), batch_size=64)  # 16 MB
    cka = CKA(network, device=probe.device)
    limit_reserve(24 * MB)
    with probe.measure() as region, pytest.raises(torch.OutOfMemoryError), cka:
        cka.compare(loader, progress=False)
    assert entered == [probe.device] * 2  # with two samples, to know the axes, and with all
    assert region.peak_increase_bytes >= 16 * MB
    assert region.retained_bytes == 0
    assert not any(module._forward_hooks for module in network.modules())
