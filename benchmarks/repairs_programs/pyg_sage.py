"""One step of PyG's GraphSAGE over a whole graph of ogbn-arxiv's sizes, as its example for OGB.

Configuration: examples of ogbn-arxiv, three layers of 256 channels, dropout 0.5, Adam.
"""

import torch
from torch_geometric.nn.models import GraphSAGE

SIZES = {"nodes": 169_343, "edges": 1_166_243, "channels": 256}
SMALL = {"nodes": 200, "edges": 1_000, "channels": 16}


def step(device, nodes, edges, channels):
    model = GraphSAGE(128, channels, num_layers=3, out_channels=40, dropout=0.5, norm="batch_norm")
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(nodes, 128, device=device)
    edge_index = torch.randint(0, nodes, (2, edges), device=device)
    labels = torch.randint(0, 40, (nodes,), device=device)
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = torch.nn.functional.cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
