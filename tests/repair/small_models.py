"""Small models for the tests of repairs, in a file that a patch can change."""

import torch
from torch import nn

VOCABULARY = 2_000
WIDTH = 32


class Block(nn.Module):
    """A block whose activations are much larger than its input."""

    def __init__(self, width=WIDTH, factor=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
        )

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    """Blocks, and the loss over a vocabulary."""

    def __init__(self, factors=(8,) * 6, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, factor) for factor in factors)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens, wanted):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def train(steps=2, batch=8, vocabulary=50, factors=(8,) * 6, make=torch.optim.AdamW):
    """Train a model for a few steps; return its parameters."""
    torch.manual_seed(0)
    model = Model(factors, vocabulary)
    optimizer = make(model.parameters())
    tokens = torch.randint(vocabulary, (batch, 64))
    for _ in range(steps):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def train_on_floats():
    """Train for two steps with batches that are floating-point numbers, and a loss module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        loss(model(torch.ones(512, 64)), torch.zeros(512, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_momentum():
    """Train for two steps with SGD; return the model and its optimizer."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    tokens = torch.randint(50, (8, 64))
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
