"""One step of minGPT's chargpt with gpt2's sizes (github.com/karpathy/minGPT), in few lines.

Configuration: mingpt/model.py (explicit attention, dropout 0.1) and projects/chargpt, which trains
gpt-mini with 64 sequences of 128 characters.
"""

import math

import torch
from torch import nn
from torch.nn import functional

SIZES = {"batch": 64, "tokens": 128, "words": 65, "width": 192, "depth": 6, "heads": 6}
SMALL = {"batch": 4, "tokens": 16, "words": 65, "width": 48, "depth": 4, "heads": 6}


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, tokens):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        mask = torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens)
        self.register_buffer("mask", mask)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf"))
        att = self.attn_dropout(functional.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.resid_dropout(self.c_proj(y))


class NewGELU(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(self, width, heads, tokens):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, tokens)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), NewGELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words, width, depth, heads, tokens):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(width, heads, tokens) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        x = self.drop(x)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )
        return logits, loss


def step(device, batch, tokens, words, width, depth, heads):
    model = GPT(words, width, depth, heads, tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
    text = torch.randint(0, words, (batch, tokens), device=device)
    for _ in range(2):
        logits, loss = model(text, text)  # noqa: RUF059 - as the source has it
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
