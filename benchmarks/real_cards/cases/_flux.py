"""Fine-tuning FLUX.2-klein-base-4B as peft's comparison of methods does: models and one step."""

import gc
from collections.abc import Callable
from typing import Any

SIZE, BATCH, TOKENS, IMAGES = 512, 2, 512, 14
PARAMETERS = 3_875_544_576
TRANSFORMER = {
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
ENCODER = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def empty(make: Callable[[], Any], dtype: Any = None) -> Any:
    """Return a model on the CPU whose weights are never written, so that they take no memory."""
    import torch

    with torch.device("meta"):
        model = make()
    if dtype is not None:
        model.to(dtype)
    return model.to_empty(device="cpu")


def move(model: Any, device: str) -> Any:
    """Move a model as ``Module.to`` does, tensor by tensor, without reading or writing weights."""
    import torch

    def moved(tensor: Any) -> Any:
        there = tensor.device.type == device
        return tensor if there else torch.empty_like(tensor, device=device)

    return model._apply(moved)


def transformer() -> Any:
    """Return the network that is trained, with checkpointing.

    Raises:
        ValueError: if this version of diffusers builds another network.
    """
    import torch
    from diffusers import Flux2Transformer2DModel

    model = empty(lambda: Flux2Transformer2DModel(**TRANSFORMER), torch.bfloat16)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != PARAMETERS:
        raise ValueError(f"the model has {found:,} parameters, the published one {PARAMETERS:,}")
    model.enable_gradient_checkpointing()
    return model


def judge() -> Any:
    """Return the network that judges images: DINOv2, base, in single precision, on the device."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(image_size=518, patch_size=14)
    return move(empty(lambda: Dinov2Model(config)), "cuda").eval()


def prompts() -> tuple[Any, Any]:
    """Encode prompts, as the source does before it trains; return what it caches of the images'."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    encoder = empty(lambda: Qwen3ForCausalLM(Qwen3Config(**ENCODER)), torch.bfloat16)
    encoder.tie_weights()
    encoder.eval().requires_grad_(False)
    with torch.no_grad():
        move(encoder, "cuda")
        cached, positions = [], []
        for _ in range(IMAGES):
            cached.append(_encoded(encoder))
            positions.append(torch.zeros(1, TOKENS, 4, dtype=torch.int64, device="cuda"))
        for _ in range(3):  # of those for evaluation, which go to the CPU
            _encoded(encoder)
        move(encoder, "cpu")
    return torch.cat(cached), torch.cat(positions)


def _encoded(encoder: Any) -> Any:
    import torch

    tokens = torch.ones(1, TOKENS, dtype=torch.int64, device="cuda")
    output = encoder(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        output_hidden_states=True,
        use_cache=False,
    )
    out = torch.stack([output.hidden_states[layer] for layer in (10, 20, 30)], dim=1)
    return out.permute(0, 2, 1, 3).reshape(1, TOKENS, -1)


def autoencoder() -> Any:
    """Return the network between images and latents, on the CPU."""
    import torch
    from diffusers import AutoencoderKLFlux2

    return empty(AutoencoderKLFlux2, torch.bfloat16).eval().requires_grad_(False)


def latents(vae: Any) -> Any:
    """Encode the images, as the source does before it trains."""
    import torch
    from diffusers import Flux2KleinPipeline

    cached = []
    with torch.no_grad():
        move(vae, "cuda")
        mean = vae.bn.running_mean.view(1, -1, 1, 1)
        std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + 1e-4)
        for _ in range(IMAGES // BATCH):
            pixels = torch.empty(BATCH, 3, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
            found = Flux2KleinPipeline._patchify_latents(vae.encode(pixels).latent_dist.mode())
            cached.append((found - mean) / std)
        move(vae, "cpu")
    return torch.cat(cached)


def evaluate(model: Any, vae: Any, judging: Any) -> None:
    """Generate an image and judge it, as the source does after every hundred steps."""
    import torch
    from diffusers import Flux2KleinPipeline

    model.eval()
    with torch.inference_mode():
        move(vae, "cuda")
        shape = (1, TOKENS, TRANSFORMER["joint_attention_dim"])
        prompt = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        noise = torch.empty(1, 128, 32, 32, dtype=torch.bfloat16, device="cuda")
        places = Flux2KleinPipeline._prepare_latent_ids(noise).to("cuda")
        packed = Flux2KleinPipeline._pack_latents(noise)
        text = torch.zeros(1, TOKENS, 4, dtype=torch.int64, device="cuda")
        time = torch.ones(1, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):
            first, second = (_predicted(model, packed, time, one, text, places) for one in prompt)
            packed = packed + second + 3.5 * (first - second)
        found = Flux2KleinPipeline._unpack_latents_with_ids(packed, places, 32, 32)
        vae.decode(Flux2KleinPipeline._unpatchify_latents(found), return_dict=False)
        for _ in range(2):
            judging(torch.empty(1, 3, 224, 224, device="cuda"))
        move(vae, "cpu")
    model.train()


def _predicted(model: Any, packed: Any, time: Any, prompt: Any, text: Any, places: Any) -> Any:
    return model(
        hidden_states=packed,
        timestep=time,
        guidance=None,
        encoder_hidden_states=prompt,
        txt_ids=text,
        img_ids=places,
        return_dict=False,
    )[0]


class Training:
    """Steps of training, with the variables that the source's loop keeps between them."""

    def __init__(self, model: Any, optimizer: Any, cached: tuple[Any, Any, Any]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.cached = cached
        self.kept: list[Any] = []
        self.losses: list[Any] = []

    def steps(self, count: int, after: Callable[[int], None] = lambda step: None) -> list[int]:
        """Train; return the bytes that are allocated after each step."""
        import torch

        return [self._step(after) or torch.cuda.memory_allocated() for _ in range(count)]

    def _step(self, after: Callable[[int], None]) -> None:
        import torch
        from diffusers import Flux2KleinPipeline

        kept = self.kept  # each of the source's variables holds a tensor until it is assigned again
        kept.extend([None] * (16 - len(kept)))
        kept[15] = torch.tensor([0, 1], device="cuda")
        kept[0], kept[1], kept[2] = (None, None, None) if not self.losses else kept[:3]
        kept[0] = self.cached[2].index_select(0, kept[15])
        kept[1] = self.cached[0].index_select(0, kept[15])
        kept[2] = self.cached[1].index_select(0, kept[15])
        kept[3] = Flux2KleinPipeline._prepare_latent_ids(kept[0]).to("cuda")
        kept[4] = torch.randn_like(kept[0])
        kept[5] = torch.ones(BATCH, device="cuda")
        kept[6] = torch.ones(BATCH, 1, 1, 1, dtype=torch.bfloat16, device="cuda")
        kept[7] = (1.0 - kept[6]) * kept[0] + kept[6] * kept[4]
        kept[8] = Flux2KleinPipeline._pack_latents(kept[7])
        self.optimizer.zero_grad(set_to_none=True)
        kept[9] = _predicted(self.model, kept[8], kept[5] / 1000, kept[1], kept[2], kept[3])
        kept[9] = kept[9][:, : kept[8].size(1)]
        kept[9] = Flux2KleinPipeline._unpack_latents_with_ids(kept[9], kept[3], 32, 32)
        kept[10] = torch.ones_like(kept[6])
        kept[11] = kept[4] - kept[0]
        weighed = kept[10].float() * (kept[9].float() - kept[11].float()) ** 2
        kept[12] = torch.mean(weighed.reshape(BATCH, -1), 1)
        del weighed
        kept[12] = kept[12].mean()
        kept[12].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        after(len(self.losses) + 1)
        kept[12] = kept[12].detach()
        self.losses.append(kept[12])


def clean() -> None:
    """Empty the cache and forget the highest level."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
