"""Fine-tuning nine language models of litgpt, 512 tokens, bfloat16: the peak of the training."""

from typing import Any, NamedTuple

from case import CUBLAS_BEFORE_2_7, Case, Figure


class Row(NamedTuple):
    """One of the source's configurations."""

    published: str
    """GB (10**9 bytes) at the peak."""
    model: str
    """Name of a configuration of litgpt."""
    batch: int
    rank: int = 32
    everywhere: bool = False
    """Whether LoRA changes all linear layers; otherwise query and value."""


ROWS = {
    "falcon-7b, LoRA": Row("16.69", "falcon-7b", 1),
    "gemma-2b, LoRA": Row("12.62", "Gemma-2b", 2, 8, everywhere=True),
    "llama-2-7b, LoRA": Row("19.77", "Llama-2-7b-hf", 2),
    "llama-3-8b, LoRA": Row("19.73", "Llama-3-8B", 1),
    "mistral-7b, LoRA": Row("20.66", "Mistral-7B-v0.1", 2),
    "phi-2, LoRA": Row("13.98", "phi-2", 4, 8, everywhere=True),
    "phi-3, LoRA": Row("19.75", "Phi-3-mini-4k-instruct", 4, 8, everywhere=True),
    "stablelm-base-alpha-3b, LoRA": Row("8.58", "stablelm-base-alpha-3b", 1),
    "tiny-llama, LoRA": Row("13.50", "tiny-llama-1.1b", 8, everywhere=True),
    "tiny-llama, full": Row("14.10", "tiny-llama-1.1b", 4, 0),
}

_VERSIONS = "versions: torch and litgpt of 2024, which are not named"

CASE = Case(
    title="Fine-tuning nine language models of 1 to 8 billion parameters, LoRA and full",
    source="https://github.com/Lightning-AI/litgpt/blob/main/config_hub/finetune/README.md",
    kind="training",
    card="a10",
    real="A10G; the versions of 2024 are not named",
    torch="2.3",
    rebuilt=("The versions of torch and litgpt."),
    figures={name: Figure(row.published, "GB", cause=_VERSIONS) for name, row in ROWS.items()},
    runs=tuple(ROWS),
    needs=("litgpt", "lightning"),
    takes="Ten trainings, of 10 to 70 s each on an idle machine, one after another.",
    environment=CUBLAS_BEFORE_2_7,
    seen=(
        "The first version left out that Fabric converts logits to float32, and that gradients of "
        "the batch before are there: it was 0.7 to 16 % too low."
    ),
    differs=(
        "Two steps of two batches of 512 tokens instead of epochs, with litgpt 0.5.13. "
        "Lightning's Fabric is written out. Models with quantized weights are left out, because "
        "they need kernels of their own, and the full training of phi-3, whose optimizer is not "
        "the one of its file: two states of all weights do not fit the card."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Validate a batch, train for two steps."""
    import torch
    from litgpt.utils import chunked_cross_entropy

    row = ROWS[run]
    model = _model(row)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-4, weight_decay=0.0)
    model.max_seq_length = 512
    tokens = torch.zeros(row.batch, 512, dtype=torch.int64)
    targets = torch.zeros(row.batch, 512, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        logits = model(tokens.to("cuda")).float()  # Fabric converts what a model returns
        chunked_cross_entropy(logits[..., :-1, :], targets.to("cuda")[..., 1:], chunk_size=0)
        del logits
    model.train()
    for step in range(4):
        given, wanted = tokens.to("cuda"), targets.to("cuda")
        if row.rank:
            logits = [chunk.float() for chunk in model(given, lm_head_chunk_size=128)]
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, wanted[..., 1:])
        else:
            logits = model(given).float()
            loss = chunked_cross_entropy(logits[..., :-1, :], wanted[..., 1:])
        (loss / 8).backward()
        if step % 2:  # gradients of the batch before are there
            optimizer.step()
            optimizer.zero_grad()
    return {run: torch.cuda.max_memory_allocated()}


def _model(row: Row) -> Any:
    import litgpt
    import torch
    from litgpt import lora

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        if row.rank:
            parts = ("query", "value")
            if row.everywhere:
                parts = ("query", "key", "value", "projection", "mlp", "head")
            config = lora.Config.from_name(
                row.model,
                lora_r=row.rank,
                lora_alpha=16,
                lora_dropout=0.05,
                **{f"lora_{part}": True for part in parts},
            )
            model: Any = lora.GPT(config)
            lora.mark_only_lora_as_trainable(model)
        else:
            model = litgpt.GPT(litgpt.Config.from_name(row.model))
    model.to_empty(device="cuda")
    torch.set_default_dtype(torch.float32)
    return model
