"""What is written into the user's files: a trial runs the same functions that a patch contains.

Each function needs only the imports of :data:`IMPORTS` and the functions that are passed with it to
:func:`text_of`. They have no annotations, because they are read in the user's code.
"""

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

IMPORTS = (
    "import functools",
    "import inspect",
    "import os",
    "import weakref",
    "import torch",
    "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts",
)


def text_of(*objects: Callable[..., Any]) -> str:
    """Return the source of functions and classes of this module, with the imports they need."""
    sources = [inspect.getsource(each).rstrip() for each in objects]
    joined = "\n".join(sources)
    needed = []
    for line in IMPORTS:
        start, _, names = line.rpartition("import ")
        used = [name for name in names.split(", ") if f"{name}." in joined or f"{name}(" in joined]
        used += [name for name in names.split(", ") if f"({name}," in joined and name not in used]
        if used:
            needed.append(f"{start}import {', '.join(used)}")
    return "\n\n\n".join(["\n".join(needed), *sources] if needed else sources)


def with_forward(module, wrap):
    """Wrap the forward of one module; a subclass, so that no reference cycle keeps it alive."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": wrap(kind.forward)})
    return module


def checkpointed(forward):
    """Compute `forward` again in backward, instead of keeping what it would have saved."""

    @functools.wraps(forward)
    def run(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def checkpoint_modules(model, kind, numbers=None):
    """Checkpoint the modules of a class: all, or those with these numbers."""
    modules = [module for module in model.modules() if type(module).__name__ == kind]
    for number in range(len(modules)) if numbers is None else numbers:
        with_forward(modules[number], checkpointed)
    return model


def keeping_products(forward):
    """Compute `forward` again in backward, but for matrix products and attention."""
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    for name in ("flash", "efficient", "cudnn"):
        kept.append(getattr(aten, f"_scaled_dot_product_{name}_attention").default)
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)

    @functools.wraps(forward)
    def run(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def saved_on_host(forward):
    """Keep on the host what backward needs of `forward`."""

    @functools.wraps(forward)
    def run(*args, **kwargs):
        with torch.autograd.graph.save_on_cpu():
            return forward(*args, **kwargs)

    return run


def chunked_cross_entropy(input, target, *, chunks=8, ignore_index=-100, label_smoothing=0.0):
    """Return the mean cross-entropy of (n, classes) logits, without a copy of all of them."""
    loss = functools.partial(
        torch.nn.functional.cross_entropy,
        reduction="sum",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    parts = zip(input.chunk(chunks), target.chunk(chunks), strict=True)
    total = sum(checkpoint(loss, rows, wanted, use_reentrant=False) for rows, wanted in parts)
    return total / (target != ignore_index).sum()


def in_place(model, kind):
    """Let the activations of a class overwrite their input."""
    for module in model.modules():
        if type(module).__name__ == kind:
            module.inplace = True
    return model


def step_in_backward(optimizer):
    """Update each parameter when its gradient is complete, and free the gradient at once."""
    owner = weakref.ref(optimizer)  # a hook that held it would keep the parameters alive
    optimizer.of_parameter = {}

    def update(parameter):
        if owner() is None:
            return
        own, group = owner().of_parameter[parameter]
        changed = {name: group[name] for name in group if name not in ("params", "param_names")}
        own.param_groups[0].update(changed)  # by a scheduler
        own.step()
        own.zero_grad()

    for group in optimizer.param_groups:
        accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params"}
        options = {name: group[name] for name in group if name in accepted}
        settings = {name: group[name] for name in group if name != "param_names"}
        for parameter in group["params"]:
            if parameter.requires_grad:
                own = type(optimizer)([{**settings, "params": [parameter]}], **options)
                optimizer.of_parameter[parameter] = own, group
                parameter.register_post_accumulate_grad_hook(update)
    return optimizer


class MicroBatches(torch.autograd.Function):
    """The mean loss of parts of a batch; the gradients of one are added before the next."""

    @staticmethod
    def forward(ctx, losses, *parameters):
        total, sums = 0, [None] * len(parameters)
        for loss in losses:
            with torch.enable_grad():
                part = loss()
            gradients = list(torch.autograd.grad(part, parameters, allow_unused=True))
            total = total + part.detach()
            for number, new in enumerate(gradients):
                old, gradients[number] = sums[number], None
                sums[number] = new if old is None else old if new is None else old.add_(new)
            del part, new, old
        ctx.sums = sums
        return total

    @staticmethod
    def backward(ctx, gradient):
        sums, ctx.sums = ctx.sums, None
        return None, *(each if each is None else each.mul_(gradient) for each in sums)


def in_micro_batches(count):
    """Compute the loss that a model returns in equal parts of its batch."""

    def wrap(forward):
        @functools.wraps(forward)
        def run(self, *batch):
            if not torch.is_grad_enabled():
                return forward(self, *batch)
            parts = zip(*(each.chunk(count) for each in batch), strict=True)
            losses = (lambda part=part: forward(self, *part) / count for part in parts)
            parameters = [each for each in self.parameters() if each.requires_grad]
            return MicroBatches.apply(losses, *parameters)

        return run

    return wrap


def with_bfloat16(model):
    """Convert a model to bfloat16, and what it is called with."""

    def converted(value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_float else value

    def convert(_, args, kwargs):
        return tuple(map(converted, args)), {name: converted(kwargs[name]) for name in kwargs}

    model.register_forward_pre_hook(convert, with_kwargs=True)
    return model.to(torch.bfloat16)


def sharded(model, part=None):
    """Keep a part of each parameter on each card; those of a block are whole while it runs."""
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():  # under torchrun
        torch.get_device_module().set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group()
    for module in list(model.modules()):
        if type(module).__name__ == part:
            fully_shard(module)
    return fully_shard(model)


def of_torchao(name):
    """Return an optimizer of torchao that is called like one of torch."""
    import torchao.optim

    def make(params, *args, foreach=None, fused=None, **options):  # it has neither of the two
        return getattr(torchao.optim, name)(params, *args, **options)

    return make
