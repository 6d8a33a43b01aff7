"""One forward pass of networks that diffusers times: FLUX, LTX-Video and Stable Diffusion."""

from collections.abc import Callable
from typing import Any

from _flux_program import empty, move
from case import Case, Figure

PUBLISHED = {
    "FLUX.1-dev": "22.64",
    "FLUX.1-dev, stored as float8": "22.19",
    "LTX-Video 0.9.7": "25.22",
    "LTX-Video 0.9.7, stored as float8": "24.38",
    "Stable Diffusion XL": "5.05",
    "Stable Diffusion XL, stored as float8": "4.89",
}
PARAMETERS_B = {"FLUX.1-dev": 11.9, "LTX-Video 0.9.7": 13.04, "Stable Diffusion XL": 2.57}

CASE = Case(
    title="Networks of images and videos, bfloat16, batch 1",
    source="https://huggingface.co/datasets/diffusers/benchmarks",
    kind="inference",
    card="l40",
    real="L40S (the runner of diffusers' benchmarks); torch of July 2025",
    torch="2.7",
    rebuilt="The versions.",
    figures={name: Figure(printed, "GiB") for name, printed in PUBLISHED.items()},
    runs=tuple(PUBLISHED),
    needs=("diffusers", "transformers"),
    differs=(
        "Two passes instead of many. Group offloading and bitsandbytes are not repeated: they pin "
        "the whole model in the computer's memory, or need kernels of their own."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Load a network and run it twice.

    Raises:
        ValueError: if this version of diffusers builds another network.
    """
    import torch

    name, _, stored = run.partition(", ")
    make, inputs = _networks()[name]
    network = empty(make, torch.bfloat16).eval()
    found = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    if round(found, 2) != PARAMETERS_B[name]:
        raise ValueError(f"{name} has {found:.3f} billion parameters, published {PARAMETERS_B}")
    move(network, "cuda")
    if stored:
        network.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    given = inputs()
    with torch.no_grad():
        for _ in range(2):
            network(**given)
    return {run: torch.cuda.max_memory_allocated()}


def _networks() -> dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]:
    import diffusers
    import torch

    def tensor(*shape: int) -> Any:
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    def flux() -> dict[str, Any]:
        return {
            "hidden_states": tensor(1, 4096, 64),
            "encoder_hidden_states": tensor(1, 512, 4096),
            "img_ids": tensor(4096, 3),
            "txt_ids": tensor(512, 3),
            "pooled_projections": tensor(1, 768),
            "timestep": tensor(1),
            "guidance": tensor(1),
        }

    def video() -> dict[str, Any]:
        return {
            "hidden_states": tensor(1, 7392, 128),
            "encoder_hidden_states": tensor(1, 256, 4096),
            "encoder_attention_mask": tensor(1, 256),
            "timestep": tensor(1),
            "video_coords": tensor(1, 3, 7392),
        }

    def stable() -> dict[str, Any]:
        return {
            "sample": tensor(1, 4, 128, 128),
            "encoder_hidden_states": tensor(1, 77, 2048),
            "timestep": tensor(1),
            "added_cond_kwargs": {"text_embeds": tensor(1, 1280), "time_ids": tensor(1, 6)},
        }

    return {
        "FLUX.1-dev": (lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True), flux),
        "LTX-Video 0.9.7": (
            lambda: diffusers.LTXVideoTransformer3DModel(
                attention_head_dim=128, cross_attention_dim=4096, num_layers=48
            ),
            video,
        ),
        "Stable Diffusion XL": (lambda: diffusers.UNet2DConditionModel(**_STABLE), stable),
    }


_STABLE: dict[str, Any] = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
