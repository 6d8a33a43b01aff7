"""What several programs have in common: sizes, configurations and inputs.

Models, losses and loops are in the programs, because that is where changes are written.
"""

import torch

LLAMA_SIZES = {"batch": 8, "tokens": 1024, "width": 576, "depth": 30, "words": 49_152}
LLAMA_SMALL = {"batch": 4, "tokens": 32, "width": 72, "depth": 4, "words": 1_024}
PHOTO_SMALL = {"batch": 4, "pixels": 64, "classes": 10}


def llama_config(width, depth, words):
    """SmolLM-135M's, with the sizes that are given."""
    from transformers import LlamaConfig  # which programs of photos do not need

    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=depth,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=words,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_cache=False,
    )


def labelled_photos(device, batch, pixels, classes):
    """Images (batch, 3, pixels, pixels) and their classes (batch,)."""
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    return images, torch.randint(0, classes, (batch,), device=device)
