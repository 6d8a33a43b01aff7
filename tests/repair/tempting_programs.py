"""Programs in which a tempting change breaks the result; each returns nothing."""

import random

import numpy
import torch
from small_models import WIDTH, Block
from torch import nn

CALLS = []


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Remembering(Block):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = x.detach()
        return super().forward(x)


class Listing(Block):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, x):
        self.shapes.append(x.shape)
        return super().forward(x)


class Caching(Block):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        self.cache[len(self.cache)] = x.shape
        return super().forward(x)


class Global(Block):
    def forward(self, x):
        CALLS.append(1)
        return super().forward(x)


class PythonRandom(Block):
    def forward(self, x):
        return super().forward(x) * random.random()


class NumpyRandom(Block):
    def forward(self, x):
        return super().forward(x) * float(numpy.random.rand())


class OwnGenerator(Block):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator)
        return super().forward(x + noise)


class BatchNorm(Block):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return super().forward(self.batch_norm(x))


class Averaging(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return super().forward(x)


class Spectral(Block):
    def __init__(self):
        super().__init__()
        self.inner[0] = nn.utils.parametrizations.spectral_norm(self.inner[0])


class HookInside(Block):
    def __init__(self):
        super().__init__()
        self.inner[0].register_forward_hook(lambda *_: CALLS.append(1))


class PreHookInside(Block):
    def __init__(self):
        super().__init__()
        self.norm.register_forward_pre_hook(lambda *_: CALLS.append(1))


CHECKPOINTS = (
    *(Counting, Remembering, Listing, Caching, Global, PythonRandom, NumpyRandom, OwnGenerator),
    *(BatchNorm, Averaging, Spectral, HookInside, PreHookInside),
)
"""Blocks that must not run twice."""


def train_blocks(kind):
    """Train four blocks of a class for one step."""
    model = nn.Sequential(*(kind() for _ in range(4)))
    model(torch.ones(8, 64, WIDTH)).square().mean().backward()


class ReadAgain(nn.Module):
    """The input of the activation is added to its result."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU()

    def forward(self, x):
        x = self.linear(x)
        return x + self.relu(x)


class ReadByView(ReadAgain):
    """It is read again through a view that was made before."""

    def forward(self, x):
        x = self.linear(x)
        view = x.view(-1)
        return self.relu(x).sum() + view.sum()


class ReadAtTheEnd(ReadAgain):
    """It is read again after many other calls."""

    def forward(self, x):
        first = self.linear(x)
        y = self.relu(first)
        for _ in range(5):
            y = self.linear(y)
        return y * first.detach()


class OfTheUser(ReadAgain):
    """The input of the activation is the user's batch."""

    def forward(self, x):
        return self.linear(self.relu(x))


class OfAParameter(ReadAgain):
    """The input of the activation is a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.linear(x) * self.relu(self.scale)


class SavedBySigmoid(ReadAgain):
    """The input of the activation was saved by the function that computed it."""

    def forward(self, x):
        return self.relu(torch.sigmoid(self.linear(x)))


class SavedByExp(ReadAgain):
    def forward(self, x):
        return self.relu(torch.exp(self.linear(x)))


class ReadTwice(ReadAgain):
    """Two activations read the same tensor."""

    def forward(self, x):
        x = self.linear(x)
        return self.relu(x) + self.relu(-x) + self.relu(x)


IN_PLACE = (
    *(ReadAgain, ReadByView, ReadAtTheEnd, OfTheUser, OfAParameter),
    *(SavedBySigmoid, SavedByExp, ReadTwice),
)
"""Models whose activation must not overwrite its input."""


def train_activation(kind):
    """Train a model with an activation for one step."""
    kind()(torch.ones(64, WIDTH)).square().mean().backward()


def _linear():
    model = nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.AdamW(model.parameters())


def clip_by_norm():
    model, optimizer = _linear()
    model(torch.ones(8, WIDTH)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def clip_by_value():
    model, optimizer = _linear()
    model(torch.ones(8, WIDTH)).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()


def scale_gradients():
    model, optimizer = _linear()
    model(torch.ones(8, WIDTH)).sum().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()


def log_gradients():
    model, optimizer = _linear()
    model(torch.ones(8, WIDTH)).sum().backward()
    print(sum(float(parameter.grad.norm()) for parameter in model.parameters()))
    optimizer.step()


def accumulate():
    model, optimizer = _linear()
    for _ in range(2):
        model(torch.ones(8, WIDTH)).sum().backward()
    optimizer.step()


def keep_graph():
    model, optimizer = _linear()
    loss = model(torch.ones(8, WIDTH)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()


def clip_in_closure():
    model, optimizer = _linear()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, WIDTH)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    optimizer.step(closure)


def accumulate_in_closure():
    model, optimizer = _linear()

    def closure():
        for _ in range(2):
            model(torch.ones(8, WIDTH)).sum().backward()

    optimizer.step(closure=closure)


STEPS = (
    *(clip_by_norm, clip_by_value, scale_gradients, log_gradients, accumulate, keep_graph),
    *(clip_in_closure, accumulate_in_closure),
)
"""Steps whose optimizer must not step while the backward pass runs."""


def move_after_closure():
    """Lightning's loop does that; the gradients that are read have been used."""
    model, optimizer = _linear()

    def closure():
        loss = model(torch.ones(8, WIDTH)).sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)
    model.cpu()


class WithLoss(nn.Module):
    """A model that returns its loss, with a layer that looks at the whole batch or draws."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


def normalize_batch():
    WithLoss(nn.BatchNorm1d(WIDTH))(torch.ones(8, WIDTH)).backward()


def drop_out():
    WithLoss(nn.Dropout(0.5))(torch.ones(8, WIDTH)).backward()


def differentiate_twice():
    model = WithLoss(nn.Tanh())
    gradients = torch.autograd.grad(
        model(torch.ones(8, WIDTH)), list(model.parameters()), create_graph=True, allow_unused=True
    )
    sum(each.square().sum() for each in gradients if each is not None).backward()


class Classifier(nn.Module):
    """A model that returns the cross-entropy of its batch, with options."""

    def __init__(self, **options):
        super().__init__()
        self.linear, self.options = nn.Linear(WIDTH, 10), options

    def forward(self, x, wanted):
        return nn.functional.cross_entropy(self.linear(x), wanted, **self.options)


def add_losses():
    Classifier(reduction="sum")(torch.ones(8, WIDTH), torch.zeros(8, dtype=torch.long)).backward()


def ignore_targets():
    wanted = torch.tensor([1, -100, -100, -100, 5, 6, 7, 8])
    Classifier()(torch.ones(8, WIDTH), wanted).backward()


def ignore_zeros():
    Classifier(ignore_index=0)(torch.ones(8, WIDTH), torch.arange(8)).backward()


def weigh_classes():
    weights = torch.arange(10.0)
    Classifier(weight=weights)(torch.ones(8, WIDTH), torch.arange(8)).backward()


BATCHES = (
    *(normalize_batch, drop_out, differentiate_twice),
    *(add_losses, ignore_targets, ignore_zeros, weigh_classes),
)
"""Steps whose batch cannot be split without a change of the numbers."""
