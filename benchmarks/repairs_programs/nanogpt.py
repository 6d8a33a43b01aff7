"""One step of nanoGPT's training of GPT-2 (124 M), in few lines (github.com/karpathy/nanoGPT).

Configuration: train.py and config/train_gpt2.py, batch 12 of 1,024 tokens, vocabulary 50,304.
"""

import torch
from torch import nn
from torch.nn import functional

SIZES = {"batch": 12, "tokens": 1024, "words": 50_304, "width": 768, "depth": 12, "heads": 12}
SMALL = {"batch": 4, "tokens": 32, "words": 1_024, "width": 64, "depth": 4, "heads": 4}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.mlp_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp_proj(self.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, words, width, depth, heads, tokens):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )
        return logits, loss


def step(device, batch, tokens, words, width, depth, heads):
    model = GPT(words, width, depth, heads, tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    text = torch.randint(0, words, (batch, tokens), device=device)
    for _ in range(2):
        logits, loss = model(text, text)  # noqa: RUF059 - as the source has it
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
