"""A slow reference: CKA in float64 by the formulas of the papers, from cloned outputs."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn


def song_hsic(gram_x: Tensor, gram_y: Tensor) -> float:
    """Return the unbiased HSIC as three sums (Song et al. 2012, eq. 5)."""
    n = len(gram_x)
    k = gram_x.double() - torch.diag(gram_x.double().diagonal())
    y = gram_y.double() - torch.diag(gram_y.double().diagonal())
    one = torch.ones(n, dtype=torch.float64)
    trace = torch.trace(k @ y)
    sums = (one @ k @ one) * (one @ y @ one) / ((n - 1) * (n - 2))
    mixed = 2 / (n - 2) * (one @ k @ y @ one)
    return float((trace + sums - mixed) / (n * (n - 3)))


def gretton_hsic(gram_x: Tensor, gram_y: Tensor) -> float:
    """Return the biased HSIC, tr(KHLH) / (n-1)² (Gretton et al. 2005)."""
    n = len(gram_x)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    product = gram_x.double() @ centring @ gram_y.double() @ centring
    return float(torch.trace(product)) / (n - 1) ** 2


def linear(features: Tensor) -> Tensor:
    """Return the linear Gram matrix of centred float64 features; centring does not change HSIC."""
    rows = features.double().flatten(1)
    rows = rows - rows.mean(0)
    return rows @ rows.T


def minibatch_cka(batches_x: list[Tensor], batches_y: list[Tensor], hsic=song_hsic) -> float:
    """Return the ratio of the sums of HSIC over batches (Nguyen et al. 2020, eq. 2)."""
    xy = xx = yy = 0.0
    for x, y in zip(batches_x, batches_y, strict=True):
        k, y_gram = linear(x), linear(y)
        xy += hsic(k, y_gram)
        xx += hsic(k, k)
        yy += hsic(y_gram, y_gram)
    return xy / (xx * yy) ** 0.5


def cloned_outputs(model: nn.Module, batches: list[Tensor], change=lambda tensor: tensor):
    """Return {label: [one clone per batch]} of the outputs of all calls of all submodules."""
    found: dict[str, list[Tensor]] = {}
    calls: Counter[str] = Counter()

    def cloning_hook(name):
        def hook(module, args, output):
            label = f"{name}:{calls[name]}" if calls[name] else name
            calls[name] += 1
            found.setdefault(label, []).append(change(output.detach()).clone())

        return hook

    handles = [
        module.register_forward_hook(cloning_hook(name))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad():
        for batch in batches:
            calls.clear()
            model(batch)
    for handle in handles:
        handle.remove()
    return found


def reference_matrix(outputs: dict[str, list[Tensor]], labels: list[str]) -> Tensor:
    """Return CKA (L, L) between the outputs with these labels."""
    grams = {label: [linear(batch) for batch in outputs[label]] for label in labels}
    terms = torch.zeros(len(labels), len(labels), dtype=torch.float64)
    for row, one in enumerate(labels):
        for column, other in enumerate(labels[: row + 1]):
            pairs = zip(grams[one], grams[other], strict=True)
            terms[row, column] = terms[column, row] = sum(song_hsic(x, y) for x, y in pairs)
    own = terms.diagonal().sqrt()
    return terms / own[:, None] / own[None, :]
