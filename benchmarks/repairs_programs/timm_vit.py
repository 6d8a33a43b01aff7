"""One step of timm's train.py with vit_base_patch16_224: 64 images, AdamW."""

import timm
import torch
from _set_ups import labelled_photos

SIZES = {"batch": 64, "model": "vit_base_patch16_224", "classes": 1000}
SMALL = {"batch": 4, "model": "test_vit", "classes": 10}


def step(device, batch, model, classes):
    network = timm.create_model(model, num_classes=classes).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    side = 160 if model == "test_vit" else 224
    images, labels = labelled_photos(device, batch, side, classes)
    for _ in range(2):
        output = network(images)
        loss = torch.nn.functional.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
