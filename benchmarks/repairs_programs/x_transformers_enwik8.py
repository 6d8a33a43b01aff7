"""One step of the enwik8 example of x-transformers (github.com/lucidrains/x-transformers).

Configuration: examples/enwik8_simple/train.py, 4 sequences of 1,024 bytes, width 512, depth 6.
"""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

SIZES = {"batch": 4, "tokens": 1024, "width": 512, "depth": 6, "heads": 8}
SMALL = {"batch": 4, "tokens": 32, "width": 64, "depth": 4, "heads": 4}


def step(device, batch, tokens, width, depth, heads):
    layers = Decoder(dim=width, depth=depth, heads=heads, rotary_pos_emb=True)
    net = TransformerWrapper(num_tokens=256, max_seq_len=tokens, attn_layers=layers)
    model = AutoregressiveWrapper(net).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text = torch.randint(0, 256, (batch, tokens + 1), device=device)
    for _ in range(2):
        loss = model(text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
