"""Leaks by loops through C++, which no collection frees: tensors, autograd nodes and hooks."""

from typing import Any

import torch
from planted import Table, leak
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

GRAPHS: Table = []
SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")  # not in torch 2.9
PACKED = "_raw_saved_result.data" if SHOWS_SAVED else "_saved_result"
HOOK = "remove the hook with handle.remove()"
ATTRIBUTE = "store tensor.detach() in the object instead of the tensor"


def weight() -> nn.Parameter:
    return nn.Parameter(torch.full((250,), 1.0))


@leak(
    GRAPHS,
    "the loop Parameter (250,).grad.grad_fn -> CopyBackwards -> AddBackward0 -> MulBackward0 -> "
    "AccumulateGrad -> the same Parameter",
    hint="set .grad to None after its last use",
    size=2004,
    made="backward(",
)
def backward_that_creates_a_graph() -> None:
    w = weight()
    (w * w).sum().backward(create_graph=True)


@leak(
    GRAPHS,
    f"the loop Tensor (250,).grad_fn -> ExpBackward0.{PACKED} -> the same Tensor",
    hint="return x.detach()",
    size=2000,
    made="torch.ones(250, requires_grad=True)",
)
def hooks_that_return_the_saved_tensor() -> None:
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.ones(250, requires_grad=True).exp()


class SavingView(torch.autograd.Function):
    """Saves a view of its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        ctx.save_for_backward(y.view(25, 10))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@leak(
    GRAPHS,
    "the loop Tensor (25, 10)._base -> Tensor (250,).grad_fn -> SavingViewBackward"
    ".saved_tensors[0] -> the same Tensor",
    hint="make the view in backward()",
    size=2000,
    made="torch.ones(250)",
)
def function_that_saves_a_view_of_its_output() -> None:
    x = torch.ones(250).requires_grad_()
    SavingView.apply(x)


@leak(
    GRAPHS,
    "the loop Parameter (250,).first_order -> Tensor (250,).grad_fn -> AddBackward0 -> "
    "MulBackward0 -> AccumulateGrad -> the same Parameter",
    hint=ATTRIBUTE,
    size=2004,
    made="torch.autograd.grad(",
)
def gradient_with_a_graph_as_an_attribute() -> None:
    w = weight()
    (w.first_order,) = torch.autograd.grad((w * w).sum(), w, create_graph=True)


@leak(
    GRAPHS,
    "the loop Parameter (250,).grad.grad_fn -> MulBackward0._saved_other -> Parameter (250,)"
    ".grad.grad_fn -> MulBackward0._saved_other -> the same Parameter",
    hint="set .grad to None after its last use",
    size=4000,
    made="torch.full((250,), 1.0)",
)
def two_gradients_that_use_the_other_parameter() -> None:
    a, b = torch.full((250,), 1.0), torch.full((250,), 1.0)
    a, b = nn.Parameter(a), nn.Parameter(b)
    a.grad, b.grad = b * b, a * a


@leak(
    GRAPHS,
    "the loop Tensor (250,)._backward_hooks[",
    hint=HOOK,
    size=2008,
    made="one * 2",
)
def hook_of_a_tensor_that_uses_the_tensor() -> None:
    one = torch.ones(250).requires_grad_()
    y = one * 2
    y.register_hook(lambda gradient: gradient * y)


@leak(GRAPHS, "the hooks of an autograd node: OrderedDict[", hint="remove()", size=2008, made="* 2")
def hook_of_a_node_that_uses_its_output() -> None:
    y = torch.ones(250).requires_grad_() * 2
    y.grad_fn.register_hook(lambda *_: y)


@leak(GRAPHS, "the hooks of an autograd node: OrderedDict[", hint="remove()", size=2008, made="* 2")
def hook_before_a_node_that_uses_its_output() -> None:
    y = torch.ones(250).requires_grad_() * 2
    y.grad_fn.register_prehook(lambda *_: y)


@leak(GRAPHS, "a dict of C++ code: dict['out'] -> ", hint="metadata", size=2008, made="* 2")
def output_in_the_metadata_of_its_node() -> None:
    y = torch.ones(250).requires_grad_() * 2
    y.grad_fn.metadata["out"] = y


@leak(
    GRAPHS,
    "the loop Parameter (250,).accumulator -> AccumulateGrad -> the same Parameter",
    hint="do not store the AccumulateGrad node of a parameter",
    made="torch.ones(250)",
)
def node_that_accumulates_as_an_attribute() -> None:
    w = nn.Parameter(torch.ones(250))
    w.accumulator = w.expand_as(w).grad_fn.next_functions[0][0]


class Net(nn.Module):
    """Keeps its last loss, and a hook that is its own method."""

    def __init__(self, w: nn.Parameter) -> None:
        super().__init__()
        self.w = w
        self.w.register_hook(self.seen)

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@leak(
    GRAPHS,
    " -> Net.last -> Tensor ().grad_fn -> SumBackward0 -> MulBackward0._saved_other -> the same "
    "Parameter",
    hint=HOOK,
    size=1004,
)
def module_with_its_last_loss_and_a_method_as_a_hook() -> None:
    net = Net(nn.Parameter(torch.ones(250)))
    net.last = (net.w * net.w).sum()


@leak(GRAPHS, "_post_accumulate_grad_hooks[", hint=HOOK, size=1004)
def optimizer_in_a_hook_with_its_last_loss() -> None:
    w = nn.Parameter(torch.ones(250))
    optimizer = torch.optim.SGD([w])
    w.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    optimizer.loss = (w * w).sum()  # type: ignore[attr-defined]


class Packed:
    """What a hook of saved tensors returns."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@leak(
    GRAPHS,
    f"the loop Tensor (250,).grad_fn -> ExpBackward0.{PACKED} -> ",
    hint="return x.detach()",
    size=2000,
    made="requires_grad=True",
)
def hooks_that_pack_the_saved_tensor_into_an_object() -> None:
    with saved_tensors_hooks(Packed, lambda packed: packed.x):
        torch.ones(250, requires_grad=True).exp()


@leak(
    GRAPHS,
    "get_inner_hook.<locals>.inner_hook",
    hint=HOOK,
    size=3016,
    made="one * ",
)
def hook_of_several_tensors() -> None:
    one = torch.ones(250).requires_grad_()
    y, z = one * 2, one * 3
    register_multi_grad_hook((y, z), lambda _: (y, z))


@leak(
    GRAPHS,
    "the loop Parameter (250,).fast -> Tensor (250,).grad_fn -> SubBackward0",
    hint=ATTRIBUTE,
    size=2012,
    made="w",
)
def adapted_parameter_as_an_attribute() -> None:
    w = weight()
    (gradient,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    w.fast = w - 0.1 * gradient


@leak(GRAPHS, "checkpoint", hint="", size=7056, made="checkpoint(")
def checkpointed_function_that_references_its_result() -> None:
    out: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() if not out else out[0]

    out.append(checkpoint(function, weight(), use_reentrant=False))
