"""One step of timm's train.py with resnet50: 128 images of 224 pixels, SGD (timm's defaults)."""

import timm
import torch
from _set_ups import PHOTO_SMALL, labelled_photos

SIZES = {"batch": 128, "pixels": 224, "classes": 1000}
SMALL = PHOTO_SMALL


def step(device, batch, pixels, classes):
    model = timm.create_model("resnet50", num_classes=classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    images, labels = labelled_photos(device, batch, pixels, classes)
    for _ in range(2):
        output = model(images)
        loss = torch.nn.functional.cross_entropy(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
