"""The implementation of ``scaled_dot_product_attention``."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_cka_memory.repair.changes.forwards import Forward, edits_of_roots, forward_of_roots
from pytest_cka_memory.repair.observation import Observed, Root
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Copied, Refusal

_BACKENDS = ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
_OF_16_BITS = {torch.bfloat16, torch.float16}
_IMPORT = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
"""


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield each implementation that does not keep the attention weights."""
    if not observed.attention or observed.device == "cpu" or observed.is_compiled:
        return
    if not observed.attention <= _OF_16_BITS:  # all but one take 16 bits only
        return
    for name in _BACKENDS:
        context = f"sdpa_kernel(SDPBackend.{name})"
        yield Change(
            f"attention by {name.partition('_')[0].lower()}",
            "attention",
            functools.partial(_trying, observed.roots, getattr(SDPBackend, name)),
            numbers=LAST_DIGITS,
            edits=edits_of_roots(observed.roots, context, context, _IMPORT),
            advice=f"call the model in torch.nn.attention.{context}",
            order=4,
        )


@contextmanager
def _trying(roots: list[Root], backend: SDPBackend, copied: Copied) -> Iterator[None]:
    def by_backend(forward: Forward) -> Forward:
        return sdpa_kernel(backend)(forward)

    with forward_of_roots(roots, by_backend):
        yield
