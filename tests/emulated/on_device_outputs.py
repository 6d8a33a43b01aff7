"""Tests of ``out=`` arguments: what the CPU's form resizes is not memory of the device.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import aliases_of_operators
import pytest
import torch

aten = torch.ops.aten


def test_operators_resize_no_alias_and_write_only_into_aliases():
    """Some operators of PyTorch's database that are computed on the CPU keep to their own memory.

    ``python tests/emulated/aliases_of_operators.py`` runs all of them.
    """
    names = (
        *("add", "linalg.lstsq", "nn.functional.logsigmoid", "nn.functional.pad.reflect"),
        *("nn.functional.max_pool3d", "mode", "split_with_sizes_copy", "sort"),
    )
    rows = []
    aliases_of_operators.run(names, (), rows.append)
    ended = [row for row in rows if "name" in row]
    assert {row["name"] for row in ended} >= set(names)
    assert all(row["calls"] >= 4 for row in ended)
    assert [row for row in ended if row["problems"]] == []


def test_check_of_aliases_finds_a_resized_alias(monkeypatch):
    """If outputs are aliases, the check names an operator whose form for the CPU resizes them."""
    from emulated_cuda import values
    from emulated_cuda.values import computing

    monkeypatch.setattr(computing, "own_output", values.on_cpu)
    rows = []
    aliases_of_operators.run(["nn.functional.pad.reflect"], (), rows.append)
    assert "became" in rows[-1]["problems"][0]


@pytest.mark.parametrize("size", [(2, 9, 4), (9, 4)])
def test_least_squares_of_a_batch_leave_other_memory_as_it_is(size):
    """``lstsq`` without a driver, forward and backward, in a batch or not, has its own outputs."""
    a, b = torch.randn(size), torch.randn(*size[:-1], 3)
    neighbours = [torch.full((64,), 7.0, device="cuda") for _ in range(8)]
    found = torch.linalg.lstsq(a.cuda(), b.cuda())
    torch.testing.assert_close(found.solution.cpu(), torch.linalg.lstsq(a, b).solution)
    assert all((one == 7).all() for one in neighbours)


def test_layout_of_an_output_does_not_change_its_values():
    """The CPU's form gives an output in channels-last order other strides; values stay in place."""
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    expected = aten.reflection_pad2d(x, [1, 1, 1, 1])
    out = torch.zeros(2, 3, 7, 7, device="cuda")
    aten.reflection_pad2d.out(x.cuda(), [1, 1, 1, 1], out=out)
    assert torch.equal(out.cpu(), expected)


def test_tensor_without_memory_is_named():
    """An operator on a tensor whose storage was freed has no value, and the error says why."""
    x = torch.ones(5, device="cuda")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \(5,\) has no memory.*illegal memory access"):
        (x + 1).tolist()
