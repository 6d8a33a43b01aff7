"""Tests of operators of half precision that a card computes in single precision and rounds once.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

OPERATORS = {
    "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "add number": lambda x, y: x + 0.3,
    "in place": lambda x, y: x.clone().add_(y, alpha=0.3),
    "out": lambda x, y: torch.add(x, y, alpha=0.3, out=torch.empty_like(x)),
    "sub": lambda x, y: torch.sub(x, y, alpha=0.3),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=0.3),
    "foreach": lambda x, y: torch._foreach_add([x], [y], alpha=0.3)[0],
    "logit": lambda x, y: torch.logit(x.abs().clamp(0.125, 0.75)),
    "logit, eps": lambda x, y: torch.logit(x, 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_half_precision_is_rounded_once(name, dtype):
    """Every element is that of single precision, rounded; the CPU's own kernel differs in some."""
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    function = OPERATORS[name]
    expected = function(x.float(), y.float()).to(dtype)
    assert torch.equal(function(x.cuda(), y.cuda()).cpu(), expected)
    assert not torch.equal(function(x, y), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lists_are_rounded_once_in_place(dtype):
    """A list of tensors, as optimizers change it in place, is rounded once."""
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    found = [x.cuda()]
    torch._foreach_add_(found, [y.cuda()], alpha=0.3)
    expected = torch.add(x.float(), y.float(), alpha=0.3).to(dtype)
    assert torch.equal(found[0].cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_numbers_of_half_precision_are_rounded_and_never_the_end(dtype):
    """Numbers between two bounds are those of single precision, rounded; the end is the start."""
    numbers = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(0)
        numbers.append(torch.rand(10_000, device="cuda", dtype=kind).cpu())
    expected = numbers[0].to(dtype)
    assert (expected == 1).any()
    assert torch.equal(numbers[1], torch.where(expected == 1, 0, expected))
    bounded = torch.empty(10_000, device="cuda", dtype=dtype).uniform_(-2, 3)
    assert bounded.min() >= -2
    assert bounded.max() < 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "native"])
def test_batch_normalization_in_half_precision_is_rounded_once(dtype, cudnn):
    """Output, gradients and running statistics are those of single precision, rounded."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.rand(2, 3, 4, 6, 6, generator=generator).to(dtype)
    weight, bias, mean, var = torch.rand(4, 4, generator=generator).to(dtype)

    def steps(*given):
        x, grad, weight, bias, mean, var = given
        x.requires_grad_()
        y = F.batch_norm(x, mean, var, weight.requires_grad_(), bias.requires_grad_(), True)
        y.backward(grad)
        return [y.detach(), x.grad, weight.grad, bias.grad, mean, var]

    given = (x, grad, weight, bias, mean, var)
    with torch.backends.cudnn.flags(enabled=cudnn):
        found = steps(*(value.cuda() for value in given))
    expected = steps(*(value.float() for value in given))
    for value, wide in zip(found, expected, strict=True):
        assert torch.equal(value.cpu(), wide.to(dtype))
