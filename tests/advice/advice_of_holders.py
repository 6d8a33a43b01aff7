"""Hints on what Python references: lists, hooks, caches, generators, optimizers, locals."""

import contextlib
import functools
import logging

import pytest
import torch
from advice_table import FLAT, KEEP, advice, follows
from torch import nn


def weight_on(device):
    return nn.Parameter(torch.ones(1000, device=device))


@advice("keep loss.item() instead of the tensor, which keeps its autograd graph alive", limit=FLAT)
def losses(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            loss = weight.sum()
            KEEP.append(loss)


@follows(losses)
def losses_as_numbers(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            loss = weight.sum()
            KEEP.append(loss.item())


@advice(
    "keep loss.item() instead of the tensor, which keeps its autograd graph alive; if no backward "
    "pass is needed, also compute it in torch.no_grad()",
    limit=FLAT,
)
def losses_of_a_validation(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            loss = weight.exp().sum()
            KEEP.append(loss)


@follows(losses_of_a_validation)
def numbers_of_a_validation(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            with torch.no_grad():
                loss = weight.exp().sum()
            KEEP.append(loss.item())


@advice(
    "keep loss.item() instead of the tensor, which keeps its autograd graph alive and uses "
    "only part of its storage"
)
def loss_in_a_larger_storage(cka_memory):
    weight, target = weight_on(cka_memory.device), torch.ones(1000, device=cka_memory.device)
    with cka_memory.measure():
        KEEP.append((weight * target)[0])


@follows(loss_in_a_larger_storage)
def number_in_a_larger_storage(cka_memory):
    weight, target = weight_on(cka_memory.device), torch.ones(1000, device=cka_memory.device)
    with cka_memory.measure():
        KEEP.append((weight * target)[0].item())


@advice(
    "the autograd graph of another tensor keeps this one; keep the other tensor's detach() "
    "instead, which has no graph, or a number computed from it, such as its mean().item()",
    limit=pytest.mark.max_retained_mb("4100 B"),
)
def output_with_its_graph(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        output = weight.exp() * 2
        KEEP.append(output)
        del output


@follows(output_with_its_graph)
def output_detached(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        output = weight.exp() * 2
        KEEP.append(output.detach())
        del output


@follows(output_with_its_graph)
def output_as_a_number(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        output = weight.exp() * 2
        KEEP.append(output.mean().item())
        del output


@advice(
    "the autograd graph of another tensor keeps this one; keep the other tensor's detach() "
    "instead, which has no graph, or a number computed from it, such as its mean().item()"
)
def output_with_its_input(cka_memory):
    layer = nn.Linear(64, 64, device=cka_memory.device).requires_grad_(False)
    with cka_memory.measure():
        inputs = torch.ones(16, 64, device=cka_memory.device, requires_grad=True)
        output = layer(inputs)
        output.sum().backward()
        KEEP.append(output)
        del inputs, output


@follows(output_with_its_input)
def output_with_its_input_as_a_number(cka_memory):
    layer = nn.Linear(64, 64, device=cka_memory.device).requires_grad_(False)
    with cka_memory.measure():
        inputs = torch.ones(16, 64, device=cka_memory.device, requires_grad=True)
        output = layer(inputs)
        output.sum().backward()
        KEEP.append(output.mean().item())
        del inputs, output


@advice(
    "keep detach().clone() instead of the tensor, which keeps its autograd graph alive and "
    "uses only part of its storage",
    limit=pytest.mark.max_retained_mb("512 B"),
)
def part_of_an_output(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append((weight * 2)[:5])


@follows(part_of_an_output)
def part_of_an_output_cloned(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append((weight * 2)[:5].detach().clone())


@advice(
    "keep what you need of the autograd node, such as its name(), instead of the node (a "
    "grad_fn, or the ctx of a Function), which keeps tensors alive",
)
def node_of_a_graph(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append((weight.exp() * 2).grad_fn)


@follows(node_of_a_graph)
def name_of_a_node(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure():
        KEEP.append((weight.exp() * 2).grad_fn.name())


@advice(
    "log a number or a string, such as loss.item() or f'{x}'; a log record keeps its "
    "arguments alive, and pytest's handlers keep each record until the test ends"
)
def logged_tensor(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        logging.getLogger("advice").warning("values %s", x)
        del x


@follows(logged_tensor)
def logged_number(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        logging.getLogger("advice").warning("values %s", x.sum().item())
        del x


@follows(logged_tensor)
def logged_text(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        logging.getLogger("advice").warning("values %s", f"{x}")
        del x


@advice(
    "keep a clone() instead of the tensor, which uses only part of its storage but keeps "
    "all of it alive, as views and the results of some losses do",
    limit=pytest.mark.max_retained_mb("512 B"),
)
def view(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(1000, device=cka_memory.device)[:5])


@follows(view)
def clone_of_a_view(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(1000, device=cka_memory.device)[:5].clone())


@advice("keep the number, tensor.item(), instead of the tensor, which has one element", limit=FLAT)
def detached_losses(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(weight.sum().detach())


@follows(detached_losses)
def detached_losses_as_numbers(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(weight.sum().detach().item())


@advice(
    "keep the number, tensor.item(), instead of the tensor, which has one element but keeps a "
    "larger storage alive, as views and the results of some losses do",
)
def element(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(1000, device=cka_memory.device)[0])


@follows(element)
def element_as_a_number(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(1000, device=cka_memory.device)[0].item())


def masking(device):
    mask = torch.ones(50, device=device)
    return lambda module, inputs, output: output * mask


@advice(
    "a hook was never removed; keep the handle that its registration returns, and call "
    "handle.remove()"
)
def hook(cka_memory):
    model = nn.Linear(5, 50).to(cka_memory.device)
    with cka_memory.measure():
        model.register_forward_hook(masking(cka_memory.device))


@follows(hook)
def hook_removed(cka_memory):
    model = nn.Linear(5, 50).to(cka_memory.device)
    with cka_memory.measure():
        handle = model.register_forward_hook(masking(cka_memory.device))
        handle.remove()
        del handle


@functools.lru_cache
def cached_ones(device):
    return torch.ones(250, device=device)


CACHE = (
    "call cache_clear(), or do not cache a function that takes or returns tensors or "
    "modules; a cache keeps arguments (such as `self`) and results alive"
)


@advice(CACHE)
def cache(cka_memory):
    with cka_memory.measure():
        cached_ones(cka_memory.device)


@follows(cache)
def cache_cleared(cka_memory):
    with cka_memory.measure():
        cached_ones(cka_memory.device)
        cached_ones.cache_clear()


@functools.lru_cache
def cached_size(device):
    return 250 if str(device) else 0


@follows(cache)
def cached_number(cka_memory):
    with cka_memory.measure():
        torch.ones(cached_size(cka_memory.device), device=cka_memory.device)


@functools.lru_cache
def cached_length(word):
    return len(word)


class Encoder(nn.Module):
    """Scores words, and has a cache of the scores or of their lengths."""

    def __init__(self, device):
        super().__init__()
        self.table = weight_on(device)

    @functools.lru_cache  # noqa: B019
    def score_of(self, word):
        return self.table.sum().item() * len(word)

    def score_by_length(self, word):
        return self.table.sum().item() * cached_length(word)


@advice(CACHE)
def cache_of_a_method(cka_memory):
    with cka_memory.measure():
        encoder = Encoder(cka_memory.device)
        encoder.score_of("word")
        del encoder


@follows(cache_of_a_method)
def cache_of_a_method_cleared(cka_memory):
    with cka_memory.measure():
        encoder = Encoder(cka_memory.device)
        encoder.score_of("word")
        encoder.score_of.cache_clear()
        del encoder


@follows(cache_of_a_method)
def cache_of_lengths(cka_memory):
    with cka_memory.measure():
        encoder = Encoder(cka_memory.device)
        encoder.score_by_length("word")
        del encoder


def rows_on(device):
    x = torch.ones(250, device=device)
    yield x.sum().item()
    yield x.mean().item()


@advice(
    "exhaust the suspended generator, or close() it; until then it keeps its local variables alive"
)
def generator(cka_memory):
    with cka_memory.measure():
        KEEP.append(rows_on(cka_memory.device))
        next(KEEP[0])


@follows(generator)
def generator_exhausted(cka_memory):
    with cka_memory.measure():
        KEEP.append(rows_on(cka_memory.device))
        list(KEEP[0])


@follows(generator)
def generator_closed(cka_memory):
    with cka_memory.measure():
        KEEP.append(rows_on(cka_memory.device))
        next(KEEP[0])
        KEEP[0].close()


class Turn:
    """Lets other coroutines run."""

    def __await__(self):
        yield


async def computed_on(device):
    x = torch.ones(250, device=device)
    await Turn()
    return x.sum().item()


async def awaited(coroutine):
    return await coroutine


@advice(
    "await the suspended coroutine, or close() it; until then it keeps its local variables alive"
)
def coroutine(cka_memory):
    with cka_memory.measure():
        KEEP.append(computed_on(cka_memory.device))
        KEEP[0].send(None)


@follows(coroutine)
def coroutine_ended(cka_memory):
    with cka_memory.measure():
        KEEP.append(computed_on(cka_memory.device))
        steps = KEEP[0].__await__()
        list(steps)
        del steps


@follows(coroutine)
def coroutine_closed(cka_memory):
    with cka_memory.measure():
        KEEP.append(computed_on(cka_memory.device))
        KEEP[0].send(None)
        KEEP[0].close()


async def async_rows_on(device):
    x = torch.ones(250, device=device)
    yield x.sum().item()


def run(awaitable):
    """Run what awaits nothing to its end."""
    with contextlib.suppress(StopIteration, StopAsyncIteration):
        awaitable.send(None)


@advice(
    "exhaust the suspended generator, or aclose() it; until then it keeps its local variables alive"
)
def async_generator(cka_memory):
    with cka_memory.measure():
        KEEP.append(async_rows_on(cka_memory.device))
        run(KEEP[0].__anext__())


@follows(async_generator)
def async_generator_exhausted(cka_memory):
    with cka_memory.measure():
        KEEP.append(async_rows_on(cka_memory.device))
        run(KEEP[0].__anext__())
        run(KEEP[0].__anext__())


@follows(async_generator)
def async_generator_closed(cka_memory):
    with cka_memory.measure():
        KEEP.append(async_rows_on(cka_memory.device))
        run(KEEP[0].__anext__())
        run(KEEP[0].aclose())


@advice(
    "call zero_grad() of the optimizer or module, or set .grad = None; until then the "
    "gradient of a parameter stays allocated"
)
def gradients(cka_memory):
    model = nn.Linear(5, 50, bias=False).to(cka_memory.device)
    inputs = torch.ones(1, 5, device=cka_memory.device)
    with cka_memory.measure():
        model(inputs).sum().backward()


@follows(gradients)
def gradients_of_an_optimizer(cka_memory):
    model = nn.Linear(5, 50, bias=False).to(cka_memory.device)
    optimizer = torch.optim.SGD(model.parameters())
    inputs = torch.ones(1, 5, device=cka_memory.device)
    with cka_memory.measure():
        model(inputs).sum().backward()
        optimizer.zero_grad()


@follows(gradients)
def gradients_of_a_module(cka_memory):
    model = nn.Linear(5, 50, bias=False).to(cka_memory.device)
    inputs = torch.ones(1, 5, device=cka_memory.device)
    with cka_memory.measure():
        model(inputs).sum().backward()
        model.zero_grad()


@follows(gradients)
def gradients_set_to_none(cka_memory):
    model = nn.Linear(5, 50, bias=False).to(cka_memory.device)
    inputs = torch.ones(1, 5, device=cka_memory.device)
    with cka_memory.measure():
        model(inputs).sum().backward()
        model.weight.grad = None


@advice(
    "set `inputs.grad = None` after its last use, or compute the gradient with "
    "torch.autograd.grad(), which sets no .grad, or do not keep the tensor; zero_grad() "
    "frees only gradients of parameters, and this tensor is not a parameter"
)
def gradient_of_an_input(cka_memory):
    inputs = torch.ones(250, device=cka_memory.device, requires_grad=True)
    with cka_memory.measure():
        inputs.exp().sum().backward()


@follows(gradient_of_an_input)
def gradient_of_an_input_set_to_none(cka_memory):
    inputs = torch.ones(250, device=cka_memory.device, requires_grad=True)
    with cka_memory.measure():
        inputs.exp().sum().backward()
        inputs.grad = None


@follows(gradient_of_an_input)
def gradient_of_an_input_that_sets_no_grad(cka_memory):
    inputs = torch.ones(250, device=cka_memory.device, requires_grad=True)
    with cka_memory.measure():
        torch.autograd.grad(inputs.exp().sum(), inputs)


@follows(gradient_of_an_input)
def gradient_of_an_input_that_is_not_kept(cka_memory):
    inputs = torch.ones(250, device=cka_memory.device, requires_grad=True)
    with cka_memory.measure():
        inputs.exp().sum().backward()
        del inputs


def optimizer_on(device):
    weight = weight_on(device)
    weight.grad = torch.ones_like(weight)
    return torch.optim.Adam([weight])


@advice(
    "take one step of the optimizer before measuring, because it allocates its state in "
    "its first step; if the measured block makes the optimizer, delete it there"
)
def first_step(cka_memory):
    optimizer = optimizer_on(cka_memory.device)
    with cka_memory.measure():
        optimizer.step()


@follows(first_step)
def second_step(cka_memory):
    optimizer = optimizer_on(cka_memory.device)
    optimizer.step()
    with cka_memory.measure():
        optimizer.step()


@follows(first_step)
def step_of_an_optimizer_that_the_block_deletes(cka_memory):
    weight = weight_on(cka_memory.device)
    weight.grad = torch.ones_like(weight)
    with cka_memory.measure():
        optimizer = torch.optim.Adam([weight])
        optimizer.step()
        del optimizer


@advice(
    "`advice_table.KEEP` keeps old optimizers, each with its state and gradients; remove "
    "them from `advice_table.KEEP`",
    limit=FLAT,
)
def old_optimizers(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            optimizer = optimizer_on(cka_memory.device)
            optimizer.step()
            KEEP.append(optimizer)


@follows(old_optimizers)
def old_optimizers_removed(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            optimizer = optimizer_on(cka_memory.device)
            optimizer.step()
            KEEP.append(optimizer)
            del KEEP[:-1]


@advice(
    "`advice_table.KEEP` keeps 2 optimizers; if the measured block creates them, remove them from "
    "`advice_table.KEEP` before the block ends; otherwise take a step before measuring, because an "
    "optimizer allocates its state in its first step"
)
def optimizers(cka_memory):
    KEEP.extend((optimizer_on(cka_memory.device), optimizer_on(cka_memory.device)))
    with cka_memory.measure():
        for optimizer in KEEP:
            optimizer.step()
        del optimizer


@follows(optimizers)
def optimizers_removed(cka_memory):
    with cka_memory.measure():
        KEEP.extend((optimizer_on(cka_memory.device), optimizer_on(cka_memory.device)))
        for optimizer in KEEP:
            optimizer.step()
        del optimizer
        KEEP.clear()


@follows(optimizers)
def optimizers_that_have_stepped(cka_memory):
    KEEP.extend((optimizer_on(cka_memory.device), optimizer_on(cka_memory.device)))
    for optimizer in KEEP:
        optimizer.step()
    with cka_memory.measure():
        for optimizer in KEEP:
            optimizer.step()


@advice("`advice_table.KEEP` grows in every batch; empty it, or limit its length", limit=FLAT)
def outputs(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(torch.ones(250, device=cka_memory.device))


@follows(outputs)
def outputs_emptied(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(torch.ones(250, device=cka_memory.device))
            KEEP.clear()


@follows(outputs)
def outputs_bounded(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(torch.ones(250, device=cka_memory.device))
            del KEEP[:-2]


@advice(
    "`advice_table.KEEP` grows in every batch; empty it, or limit its length; each of these "
    "tensors is saved for the backward pass of a tensor that is kept; instead of that tensor, keep "
    "a number such as its mean().item(); keeping its detach() would free these tensors, but not "
    "that one",
    limit=FLAT,
)
def outputs_with_graphs(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(weight.exp() * 2)


@follows(outputs_with_graphs)
def outputs_with_graphs_emptied(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(weight.exp() * 2)
            KEEP.clear()


@follows(outputs_with_graphs)
def outputs_with_graphs_bounded(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(weight.exp() * 2)
            del KEEP[:-2]


@follows(outputs_with_graphs)
def outputs_as_numbers(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight.exp() * 2).mean().item())


@advice(
    "`advice_table.KEEP` grows in every batch; empty it, or limit its length; each tensor keeps "
    "its autograd graph alive and uses only part of its storage; keeping detach().clone() instead "
    "frees the graph and the unused part of the storage, but not the part that the tensor uses",
    limit=FLAT,
)
def parts_of_outputs(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight * 2)[:5])


@follows(parts_of_outputs)
def parts_of_outputs_emptied(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight * 2)[:5])
            KEEP.clear()


@follows(parts_of_outputs)
def parts_of_outputs_bounded(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight * 2)[:5])
            del KEEP[:-2]


@advice(
    "`advice_table.KEEP` grows in every batch; empty it, or limit its length; each tensor uses "
    "only part of its storage but keeps all of it alive, as views and the results of some losses "
    "do; keeping a clone() instead frees the unused part of the storage, but not the part that "
    "the tensor uses",
    limit=FLAT,
)
def views(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(torch.ones(1000, device=cka_memory.device)[:5])


@follows(views)
def views_emptied(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(torch.ones(1000, device=cka_memory.device)[:5])
            KEEP.clear()


@follows(views)
def views_bounded(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append(torch.ones(1000, device=cka_memory.device)[:5])
            del KEEP[:-2]


@advice(
    "remove each tensor from the object that references it; each tensor uses only part of its "
    "storage but keeps all of it alive, as views and the results of some losses do; keeping a "
    "clone() instead frees the unused part of the storage, but not the part that the tensor uses",
    limit=FLAT,
)
def linked_views(cka_memory):
    seen = None
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            seen = torch.ones(1000, device=cka_memory.device)[:5], seen


@follows(linked_views)
def linked_views_removed(cka_memory):
    seen = None
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            seen = torch.ones(1000, device=cka_memory.device)[:5], seen
            seen = None


@advice(
    "`advice_table.KEEP` grows in every batch; empty it, or limit its length; keep what you need "
    "of the autograd node, such as its name(), instead of the node (a grad_fn, or the ctx of a "
    "Function), which keeps tensors alive",
    limit=FLAT,
)
def nodes_of_graphs(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight.exp() * 2).grad_fn)


@follows(nodes_of_graphs)
def nodes_of_graphs_emptied(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight.exp() * 2).grad_fn)
            KEEP.clear()


@follows(nodes_of_graphs)
def nodes_of_graphs_bounded(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight.exp() * 2).grad_fn)
            del KEEP[:-2]


@follows(nodes_of_graphs)
def names_of_nodes(cka_memory):
    weight = weight_on(cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            KEEP.append((weight.exp() * 2).grad_fn.name())


class Attention(nn.Module):
    """Keeps its keys."""

    def __init__(self):
        super().__init__()
        self.keys = []


@advice(
    "`advice_table.KEEP[0].keys` has 3 entries that keep these tensors alive; empty it in the block"
)
def several(cka_memory):
    KEEP.append(Attention())
    with cka_memory.measure():
        for _ in range(3):
            KEEP[0].keys.append(torch.ones(250, device=cka_memory.device))


@follows(several)
def several_emptied(cka_memory):
    KEEP.append(Attention())
    with cka_memory.measure():
        for _ in range(3):
            KEEP[0].keys.append(torch.ones(250, device=cka_memory.device))
        KEEP[0].keys.clear()


def check(x):
    raise ValueError("odd")


@advice(
    "store the text of the exception instead of the exception, which keeps its frames and "
    "their variables alive"
)
def exception(cka_memory):
    with cka_memory.measure():
        try:
            check(torch.ones(250, device=cka_memory.device))
        except ValueError as error:
            KEEP.append(error)


@follows(exception)
def text_of_an_exception(cka_memory):
    with cka_memory.measure():
        try:
            check(torch.ones(250, device=cka_memory.device))
        except ValueError as error:
            KEEP.append(str(error))


@advice(
    "`x` is a local variable of local_tensor; write `del x` in the block, or move the body "
    "of the block into a function"
)
def local_tensor(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        x.sum().item()


@follows(local_tensor)
def local_tensor_deleted(cka_memory):
    with cka_memory.measure():
        x = torch.ones(250, device=cka_memory.device)
        x.sum().item()
        del x


def body(device):
    x = torch.ones(250, device=device)
    x.sum().item()


@follows(local_tensor)
def local_tensor_of_a_function(cka_memory):
    with cka_memory.measure():
        body(cka_memory.device)


@advice(
    "`batch` is a local variable of local_object; if the measured block creates it, write `del "
    "batch` at the end of the block; otherwise do not store the tensor in it"
)
def local_object(cka_memory):
    batch = {}
    with cka_memory.measure():
        batch["x"] = torch.ones(250, device=cka_memory.device)


@follows(local_object)
def local_object_deleted(cka_memory):
    with cka_memory.measure():
        batch = {}
        batch["x"] = torch.ones(250, device=cka_memory.device)
        del batch


@follows(local_object)
def local_object_without_the_tensor(cka_memory):
    batch = {}
    with cka_memory.measure():
        torch.ones(250, device=cka_memory.device)
    del batch


@advice(
    "batch in same_object (advice_of_holders.py:N) and advice_table.KEEP[0] are the same object; "
    "if the measured block creates it, remove each of these references; otherwise do not store the "
    "tensor in it"
)
def same_object(cka_memory):
    with cka_memory.measure():
        batch = {"x": torch.ones(250, device=cka_memory.device)}
        KEEP.append(batch)


@follows(same_object)
def same_object_deleted(cka_memory):
    with cka_memory.measure():
        batch = {"x": torch.ones(250, device=cka_memory.device)}
        KEEP.append(batch)
        del batch
        KEEP.clear()


@follows(same_object)
def same_object_without_the_tensor(cka_memory):
    with cka_memory.measure():
        batch = {}
        torch.ones(250, device=cka_memory.device)
        KEEP.append(batch)


@advice(
    "each batch replaces `seen` by a larger one; limit its length, or empty it between batches",
    limit=FLAT,
)
def concatenated(cka_memory):
    seen = torch.ones(0, device=cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(16)):
            seen = torch.cat([seen, torch.ones(250, device=cka_memory.device)])


@follows(concatenated)
def concatenated_and_limited(cka_memory):
    seen = torch.ones(0, device=cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(16)):
            seen = torch.cat([seen, torch.ones(250, device=cka_memory.device)])[-250:]


@follows(concatenated)
def concatenated_and_emptied(cka_memory):
    seen = torch.ones(0, device=cka_memory.device)
    with cka_memory.measure() as region:
        for _ in region.batches(range(16)):
            seen = torch.cat([seen, torch.ones(250, device=cka_memory.device)])
            seen = torch.ones(0, device=cka_memory.device)


@advice("remove each from what holds it, or keep a number computed from it instead")
def kept(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(250, device=cka_memory.device))


@follows(kept)
def kept_and_removed(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(250, device=cka_memory.device))
        KEEP.pop()


@follows(kept)
def kept_as_a_number(cka_memory):
    with cka_memory.measure():
        KEEP.append(torch.ones(250, device=cka_memory.device).mean().item())
