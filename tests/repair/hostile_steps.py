"""Steps in which a change that looks free changes the results. Each returns what it computed."""

import copy
import dataclasses

import torch
from small_models import WIDTH, Block
from torch import nn
from torch.nn import functional

STACK = []


class Stacked(torch.autograd.Function):
    """Keeps what backward needs in a list of the program, last in, first out."""

    @staticmethod
    def forward(ctx, x):
        STACK.append(x.detach().clone() + len(STACK))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * STACK.pop()


class StackedBlock(Block):
    """Its forward calls a function that keeps a tensor outside of autograd."""

    def forward(self, x):
        return super().forward(Stacked.apply(x))


def keep_tensors_in_a_list():
    """A custom function whose state is not saved by autograd."""
    STACK.clear()
    model = nn.Sequential(*(StackedBlock() for _ in range(4)))
    model(torch.rand(8, 64, WIDTH)).square().mean().backward()
    return model


class Masking(torch.autograd.Function):
    """Keeps an attribute that is no tensor, and one that is not saved by autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale, ctx.mask = float(x.shape[0]), x > 0
        return x * ctx.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask * ctx.scale


class MaskingBlock(Block):
    def forward(self, x):
        return super().forward(Masking.apply(x))


def keep_state_in_the_context():
    model = nn.Sequential(*(MaskingBlock() for _ in range(4)))
    model(torch.rand(8, 64, WIDTH)).square().mean().backward()
    return model


class Tied(nn.Module):
    """One block that is called several times, and a head whose weight is that of the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text):
        x = self.words(text)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), text.flatten())


def train_tied():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = torch.randint(1000, (8, 16))
    for _ in range(2):
        model(text).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def perceive():
    """The loss is of features that hooks keep of a frozen network, whose result nobody uses."""
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    network.requires_grad_(False)
    features = []
    network[1].register_forward_hook(lambda module, args, result: features.append(result))
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    made = model(torch.rand(64, WIDTH))
    network(made)
    (0.1 * made.square().mean() + features[0].square().mean()).backward()
    return model


class Found:
    """What a model returns: tensors in attributes."""

    def __init__(self, hidden):
        self.hidden = hidden


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return (x * self.scale).mean(), Found(x.exp() * self.scale)


def use_a_part_of_what_is_returned():
    """The first model's result is a number that nobody uses, and an object that the second uses."""
    encoder, decoder = Encoder(), nn.Linear(WIDTH, WIDTH)
    _, found = encoder(torch.rand(64, WIDTH))
    decoder(found.hidden).square().mean().backward()
    return nn.ModuleList([encoder, decoder])


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class ReturnsDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        x = self.blocks(x)
        return Output(x.square().mean(), x)


def return_a_dataclass():
    model = ReturnsDataclass()
    model(torch.rand(8, 64, WIDTH)).loss.backward()
    return model


def _linear(kind=torch.optim.SGD, **options):
    model = nn.Linear(WIDTH, WIDTH)
    return model, kind(model.parameters(), lr=0.1, **options)


def average_before_the_step():
    """The average of the weights is updated after backward, before the optimizer steps."""
    model, optimizer = _linear()
    average = copy.deepcopy(model).requires_grad_(False)
    for _ in range(2):
        model(torch.rand(8, WIDTH)).square().sum().backward()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList([model, average])


def average_after_the_step():
    """The usual order: nothing reads the weights between backward and the step."""
    model, optimizer = _linear()
    average = copy.deepcopy(model).requires_grad_(False)
    for _ in range(2):
        model(torch.rand(8, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.5)
    return nn.ModuleList([model, average])


def evaluate_before_the_step():
    """The model is called once more before its weights are updated."""
    model, optimizer = _linear()
    results = nn.ParameterList()
    for _ in range(2):
        model(torch.rand(8, WIDTH)).square().sum().backward()
        with torch.no_grad():
            results.append(model(torch.ones(8, WIDTH)))
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList([model, results])


def change_the_rate_before_the_step():
    """A warm-up sets the learning rate after backward."""
    model, optimizer = _linear()
    for number in range(3):
        model(torch.rand(8, WIDTH)).square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (number + 1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def cycle_the_momentum():
    """A scheduler changes the momentum beside the learning rate, after each step."""
    model, optimizer = _linear(momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    for _ in range(4):
        model(torch.rand(8, WIDTH)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def scale_the_loss(**options):
    """Gradients are scaled until the step."""
    model, optimizer = _linear(torch.optim.Adam, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        loss = model(torch.rand(8, WIDTH)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def scale_the_loss_fused():
    """A fused optimizer gets the scale, and divides by it itself."""
    return scale_the_loss(fused=True)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def make_weights_late():
    """Weights are made in the first call."""
    model = nn.Sequential(*(Lazy() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.rand(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def compile_blocks():
    """Blocks are compiled, not the model."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        block.compile(backend="eager")
    model(torch.rand(8, 64, WIDTH)).square().mean().backward()
    return model


class Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Contrast(Loss):
    """Each row of the batch is compared with all others."""

    def forward(self, x):
        z = functional.normalize(self.linear(x), dim=-1)
        return functional.cross_entropy(z @ z.T * 10, torch.arange(len(x)))


class Centred(Loss):
    """The mean over the batch is subtracted."""

    def forward(self, x):
        x = self.linear(x)
        return (x - x.mean(0)).square().mean()


class Normalized(Loss):
    """Statistics over the batch by a function."""

    def forward(self, x):
        return functional.batch_norm(self.linear(x), None, None, training=True).tanh().mean()


class Noisy(Loss):
    """Random numbers without a layer for dropout."""

    def forward(self, x):
        return functional.dropout(self.linear(x), 0.5, training=True).square().mean()


def _one_step(kind):
    def step():
        model = kind()
        model(torch.rand(8, WIDTH)).backward()
        return model

    step.__name__ = kind.__name__
    return step


BATCHES = tuple(map(_one_step, (Contrast, Centred, Normalized, Noisy)))
STEPS = (
    *(keep_tensors_in_a_list, keep_state_in_the_context, train_tied, perceive),
    *(use_a_part_of_what_is_returned, return_a_dataclass),
    *(average_before_the_step, average_after_the_step, evaluate_before_the_step),
    *(change_the_rate_before_the_step, cycle_the_momentum, scale_the_loss, scale_the_loss_fused),
    *(make_weights_late, compile_blocks, *BATCHES),
)
