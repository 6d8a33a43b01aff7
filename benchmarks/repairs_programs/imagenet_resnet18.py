"""One step of pytorch/examples/imagenet with resnet18: 256 images of 224 pixels, SGD."""

import torch
from _set_ups import PHOTO_SMALL, labelled_photos
from torchvision import models

SIZES = {"batch": 256, "pixels": 224, "classes": 1000}
SMALL = PHOTO_SMALL


def step(device, batch, pixels, classes):
    model = models.resnet18(num_classes=classes).to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    images, target = labelled_photos(device, batch, pixels, classes)
    for _ in range(2):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
