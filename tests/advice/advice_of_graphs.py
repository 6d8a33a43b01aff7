"""Hints on autograd graphs that reach back through batches, and on loops through C++."""

import functools
import weakref

import torch
from advice_table import CLEANUP, CPU, FLAT, NATIVE, advice, follows, needs_torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


def weight_on(device):
    return nn.Parameter(torch.ones(250, device=device))


LOSSES = (
    "add loss.item() to the sum instead of the loss; if backward() is called on the sum, "
    "call it on the loss of each batch instead"
)
SUM_OF_LOSSES = (
    "the autograd graph of `total` reaches back through several batches, because each "
    "batch computes it from its last value by `total + weight.exp().sum()` at "
    f"advice_of_graphs.py:N; {LOSSES}"
)


@advice(SUM_OF_LOSSES, limit=FLAT)
def sum_of_losses(cka_memory):
    weight, total = weight_on(cka_memory.device), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            total = total + weight.exp().sum()


@follows(sum_of_losses)
def sum_of_numbers(cka_memory):
    weight, total = weight_on(cka_memory.device), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            total = total + weight.exp().sum().item()


@advice(SUM_OF_LOSSES, limit=FLAT)
def backward_on_the_sum(cka_memory):
    weight, total = weight_on(cka_memory.device), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            total = total + weight.exp().sum()
        total.backward()


@follows(backward_on_the_sum)
def backward_on_each_loss(cka_memory):
    weight, total = weight_on(cka_memory.device), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            loss = weight.exp().sum()
            loss.backward()
            total = total + loss.item()


@advice(
    "the autograd graph of `total` reaches back through several batches, because each "
    "batch computes it from its last value by `total + weight.sum().exp()` at "
    "advice_of_graphs.py:N; add loss.item() to the sum instead of the loss",
    limit=FLAT,
)
def sum_of_losses_that_save_numbers(cka_memory):
    weight, total = weight_on(cka_memory.device), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            total = total + weight.sum().exp()


@follows(sum_of_losses_that_save_numbers)
def sum_of_numbers_of_losses(cka_memory):
    weight, total = weight_on(cka_memory.device), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            total = total + weight.sum().exp().item()


@advice(
    "C or C++ code, such as a running sum(), references a tensor, made by `sum(weight.exp().sum() "
    "for _ in region.batches(range(8)))` at advice_of_graphs.py:N, whose autograd graph reaches "
    f"back through several batches; {LOSSES}",
    limit=FLAT,
    skip=NATIVE,
)
def running_sum(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        sum(weight.exp().sum() for _ in region.batches(range(8))).backward()


@follows(running_sum)
def running_sum_of_numbers(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        sum(weight.exp().sum().item() for _ in region.batches(range(8)))


def number_after_backward(loss):
    loss.backward()
    return loss.item()


@follows(running_sum)
def running_sum_after_backward(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        sum(number_after_backward(weight.exp().sum()) for _ in region.batches(range(8)))


@advice(
    "C or C++ code, such as a running sum(), references a tensor, made by `hidden * weight` at "
    "advice_of_graphs.py:N, whose autograd graph reaches back through several batches; compute "
    "each new value from a detach() of the previous one, or in torch.no_grad()",
    limit=FLAT,
    skip=NATIVE,
)
def reduced_state(cka_memory):
    weight, first = weight_on(cka_memory.device), torch.ones(250, device=cka_memory.device)
    with cka_memory.measure() as region:
        batches = region.batches(range(8))
        functools.reduce(lambda hidden, _: hidden * weight, batches, first)


@follows(reduced_state)
def reduced_state_detached(cka_memory):
    weight, first = weight_on(cka_memory.device), torch.ones(250, device=cka_memory.device)
    with cka_memory.measure() as region:
        batches = region.batches(range(8))
        functools.reduce(lambda hidden, _: hidden.detach() * weight, batches, first)


@follows(reduced_state)
def reduced_state_without_a_graph(cka_memory):
    weight, first = weight_on(cka_memory.device), torch.ones(250, device=cka_memory.device)
    with cka_memory.measure() as region, torch.no_grad():
        batches = region.batches(range(8))
        functools.reduce(lambda hidden, _: hidden * weight, batches, first)


@advice(
    "the autograd graph of `hidden` reaches back through several batches, because each "
    "batch computes it from its last value by `(hidden * weight).tanh()` at "
    "advice_of_graphs.py:N; detach it in each batch, as in `hidden = hidden.detach()`, or "
    "compute it in torch.no_grad()",
    limit=FLAT,
)
def hidden_state(cka_memory):
    weight, hidden = weight_on(cka_memory.device), torch.ones(250, device=cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            hidden = (hidden * weight).tanh()


@follows(hidden_state)
def hidden_state_detached(cka_memory):
    weight, hidden = weight_on(cka_memory.device), torch.ones(250, device=cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            hidden = (hidden * weight).tanh()
            hidden = hidden.detach()


@follows(hidden_state)
def hidden_state_without_a_graph(cka_memory):
    weight, hidden = weight_on(cka_memory.device), torch.ones(250, device=cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            with torch.no_grad():
                hidden = (hidden * weight).tanh()


@advice(
    "set .grad to None after its last use (zero_grad() does so), or use "
    "torch.autograd.grad(..., create_graph=True), which sets no .grad; after "
    "backward(create_graph=True), a parameter and its gradient, whose graph uses the "
    "parameter, keep each other alive",
    skip=NATIVE,
)
def gradient_with_a_graph(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        (weight * weight).sum().backward(create_graph=True)
        del weight


@follows(gradient_with_a_graph)
def gradient_with_a_graph_set_to_none(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        (weight * weight).sum().backward(create_graph=True)
        weight.grad = None
        del weight


@follows(gradient_with_a_graph)
def gradient_with_a_graph_that_sets_no_grad(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        torch.autograd.grad((weight * weight).sum(), weight, create_graph=True)
        del weight


@advice(
    "let the pack hook of saved_tensors_hooks return x.detach() or x.clone(); the saved "
    "tensor itself references the graph that it is saved in",
    skip=NATIVE,
)
def hooks_that_pack_the_tensor(cka_memory):
    with cka_memory.measure(), saved_tensors_hooks(lambda x: x, lambda x: x):
        weight_on(cka_memory.device).exp()


@follows(hooks_that_pack_the_tensor)
def hooks_that_pack_the_detached_tensor(cka_memory):
    with cka_memory.measure(), saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        weight_on(cka_memory.device).exp()


@follows(hooks_that_pack_the_tensor)
def hooks_that_pack_a_copy(cka_memory):
    with cka_memory.measure(), saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        weight_on(cka_memory.device).exp()


class SavesView(torch.autograd.Function):
    """Saves a view of its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.save_for_backward(y.view(25, 10))
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].view(250)


class SavesOutput(torch.autograd.Function):
    """Saves its output, and makes the view in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].view(25, 10).view(250)


@advice(
    "save the output itself in the autograd Function, and make the view in backward(); a "
    "view of the output references the graph that it is saved in",
    skip=NATIVE,
)
def saved_view(cka_memory):
    with cka_memory.measure():
        SavesView.apply(weight_on(cka_memory.device))


@follows(saved_view)
def saved_output(cka_memory):
    with cka_memory.measure():
        SavesOutput.apply(weight_on(cka_memory.device))


class KeepsOutput(torch.autograd.Function):
    """Keeps its output in its context."""

    @staticmethod
    def forward(ctx, x):
        ctx.y, ctx.z = x.exp(), x.exp()
        return ctx.y, ctx.z

    @staticmethod
    def backward(ctx, first, second):
        return (first + second) * ctx.y


class SavesExp(torch.autograd.Function):
    """Saves its output for its backward pass."""

    @staticmethod
    def forward(ctx, x):
        y, z = x.exp(), x.exp()
        ctx.save_for_backward(y, z)
        return y, z

    @staticmethod
    def backward(ctx, first, second):
        return (first + second) * ctx.saved_tensors[0]


@advice(
    "use ctx.save_for_backward(output) instead of an attribute of ctx; the attribute keeps the "
    "output alive, the output keeps its graph, and the graph keeps ctx",
    skip=NATIVE,
)
def output_in_a_context(cka_memory):
    with cka_memory.measure():
        KeepsOutput.apply(weight_on(cka_memory.device))


@follows(output_in_a_context)
def output_saved_for_backward(cka_memory):
    with cka_memory.measure():
        SavesExp.apply(weight_on(cka_memory.device))


@advice(
    "remove the hook with handle.remove(), or let it use only its arguments, or a "
    "weakref.ref to the tensor; the hook references a tensor that references the hook's "
    "own graph",
    skip=NATIVE,
)
def hook_of_its_own_tensor(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        output.register_hook(functools.partial(torch.mul, output))
        del output


@follows(hook_of_its_own_tensor)
def hook_of_its_own_tensor_removed(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        handle = output.register_hook(functools.partial(torch.mul, output))
        handle.remove()
        del output, handle


@follows(hook_of_its_own_tensor)
def hook_that_uses_its_argument(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        output.register_hook(lambda gradient: gradient * 2)
        del output


@follows(hook_of_its_own_tensor)
def hook_with_a_weak_reference(cka_memory):
    with cka_memory.measure():
        output = weight_on(cka_memory.device) * 2
        weak = weakref.ref(output)
        output.register_hook(lambda gradient: gradient * weak())
        del output


@advice(
    "do not store the AccumulateGrad node of a parameter in an attribute of that parameter, or "
    "delete the attribute after the last use of the parameter; the parameter and the node keep "
    "each other alive",
    skip=NATIVE,
)
def node_of_a_parameter(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        weight.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        del weight


@follows(node_of_a_parameter)
def node_elsewhere(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        del weight, node


@follows(node_of_a_parameter)
def node_deleted_with_its_parameter(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        weight.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        del weight.node, weight


@advice(
    "store tensor.detach() in the object instead of the tensor, or delete the attribute after its "
    "last use; the graph of the tensor references the object that keeps the tensor",
    skip=NATIVE,
)
def gradient_as_an_attribute(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        (first,) = torch.autograd.grad((weight * weight).sum(), weight, create_graph=True)
        weight.first = first
        del weight, first


@follows(gradient_as_an_attribute)
def gradient_as_a_detached_attribute(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        (first,) = torch.autograd.grad((weight * weight).sum(), weight, create_graph=True)
        weight.first = first.detach()
        del weight, first


@follows(gradient_as_an_attribute)
def gradient_as_a_deleted_attribute(cka_memory):
    with cka_memory.measure():
        weight = weight_on(cka_memory.device)
        (first,) = torch.autograd.grad((weight * weight).sum(), weight, create_graph=True)
        weight.first = first
        del weight.first, weight, first


@advice(
    "delete one reference of the loop when it is no longer needed, or make it weak with "
    "weakref.ref; the garbage collector never frees the loop, because it does not see the "
    "references that C++ objects in it hold",
    skip=NATIVE,
)
def view_as_an_attribute(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        x.part = x[:5]
        del x


@follows(view_as_an_attribute)
def view_as_an_attribute_deleted(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        x.part = x[:5]
        del x.part, x


@follows(view_as_an_attribute)
def view_as_an_attribute_made_weak(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        x.part = weakref.ref(x[:5])
        del x


def one_rank():
    """Start a process group that has this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    CLEANUP.callback(dist.destroy_process_group)


@advice(
    "use fully_shard() instead of FSDP; a module keeps a view of FSDP's flat parameter, "
    "the graph of the view keeps the flat parameter, and the flat parameter keeps its "
    "modules",
    devices=(CPU,),
    skip=NATIVE or needs_torch(2, 12),
)
def flat_parameters(cka_memory):
    from torch.distributed.fsdp import FullyShardedDataParallel

    one_rank()
    with cka_memory.measure():
        layers = nn.Sequential(nn.Linear(5, 50, bias=False))
        model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
        model(torch.ones(2, 5)).sum().backward()
        del layers, model


@follows(flat_parameters)
def fully_sharded(cka_memory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one_rank()
    mesh = init_device_mesh("cpu", (1,))
    with cka_memory.measure():
        model = fully_shard(nn.Sequential(nn.Linear(5, 50, bias=False)), mesh=mesh)
        model(torch.ones(2, 5)).sum().backward()
        del model
