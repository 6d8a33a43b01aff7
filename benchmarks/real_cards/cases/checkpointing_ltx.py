"""A transformer of LTX-Video, checkpointed in four ways: the reserve of both passes."""

import gc
from typing import Any

from case import CUBLAS_BEFORE_2_7, Case, Figure

# GB (2**30 bytes) at the peak, and which blocks are checkpointed: every n-th; 0 for none.
PUBLISHED = {
    "none": ("26.664", 0),
    "all blocks": ("9.316", 1),
    "every 2nd block": ("17.658", 2),
    "every 4th block": ("22.188", 4),
}

_CAUSE = "what was assumed of the program, and other versions"

CASE = Case(
    title="LTX-Video's transformer of 1.9 billion parameters, 81 images of 512 x 768, bfloat16",
    source="https://github.com/huggingface/diffusers/pull/10611",
    kind="training",
    card="a100",
    real="not named; January 2025",
    torch="2.5",
    rebuilt=("The program, of which a part could be read, and the versions."),
    figures={
        "the model": Figure("4.025", "GiB", "reserved"),
        **{
            name: Figure(printed, "GiB", "peak reserved", cause=_CAUSE)
            for name, (printed, _) in PUBLISHED.items()
        },
    },
    needs=("diffusers",),
    environment=CUBLAS_BEFORE_2_7,
    seen=(
        "The first version had the one kernel for rms_norm that torch has now; torch 2.5 had "
        "several operators, which keep more: it was 11 to 20 % too low. That the source counts the "
        "reserve followed from its figure for the model alone, which is larger than the weights."
    ),
    differs=(
        "Rebuilt from the text, of which only a part could be read: 128 tokens of text, the sum as "
        "the loss, and gradients that stay are assumed. Two passes of each."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Make the model once, and pass forward and backward twice in each way."""
    import torch
    from diffusers import LTXVideoTransformer3DModel
    from torch.utils.checkpoint import checkpoint

    torch.nn.functional.rms_norm = _rms_norm  # type: ignore[assignment]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LTXVideoTransformer3DModel()
    model.to_empty(device="cuda")
    frames, height, width = 11, 16, 24
    given = {
        "hidden_states": torch.empty(1, frames * height * width, 128, device="cuda"),
        "encoder_hidden_states": torch.empty(1, 128, 4096, device="cuda"),
        "timestep": torch.zeros(1, dtype=torch.int64, device="cuda"),
        "encoder_attention_mask": torch.ones(1, 128, dtype=torch.bool, device="cuda"),
        "num_frames": frames,
        "height": height,
        "width": width,
        "return_dict": False,
    }
    found = {"the model": torch.cuda.memory_reserved()}
    forwards = [block.forward for block in model.transformer_blocks]
    for name, (_, every) in PUBLISHED.items():
        for at, block in enumerate(model.transformer_blocks):
            chosen = every > 0 and at % every == 0
            block.forward = _checkpointed(forwards[at], checkpoint) if chosen else forwards[at]
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            model(**given)[0].sum().backward()
        found[name] = torch.cuda.max_memory_reserved()
    return found


def _rms_norm(given: Any, _shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Compute it by the operators that torch before 2.8 has."""
    wide = given.float()
    result = wide * (wide.pow(2).mean(-1, keepdim=True) + (eps or 1e-6)).rsqrt()
    return (result if weight is None else result * weight).type_as(given)


def _checkpointed(forward: Any, checkpoint: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
