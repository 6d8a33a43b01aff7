"""The network of e3nn's example ``tetris.py``, trained on the card and beside the CPU."""

import sys

sys.path.insert(0, "examples")
import tetris
import torch

LOSSES = {}
pos, labels = tetris.tetris()
batch = tetris.make_batch(pos)
torch.manual_seed(0)
weights = tetris.Network().state_dict()
for device in ("cpu", "cuda"):
    network = tetris.Network().to(device)
    network.load_state_dict(weights)
    data, target = batch.clone().to(device), labels.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    LOSSES[device] = []
    for _ in range(5):
        loss = (network(data) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        LOSSES[device].append(loss.item())
torch.testing.assert_close(LOSSES["cuda"], LOSSES["cpu"], rtol=1e-4, atol=1e-5)
print("RESULT", LOSSES["cuda"], flush=True)
