"""One step of MONAI's spleen tutorial: a 3D U-Net, 8 patches of 96 pixels, Dice loss, Adam."""

import torch
from monai.losses import DiceLoss
from monai.networks.nets import UNet

SIZES = {"batch": 8, "pixels": 96, "channels": (16, 32, 64, 128, 256)}
SMALL = {"batch": 4, "pixels": 32, "channels": (4, 8, 8, 8, 8)}


def step(device, batch, pixels, channels):
    model = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=channels,
        strides=(2, 2, 2, 2),
        num_res_units=2,
        norm="batch",
    ).to(device)
    loss_function = DiceLoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    images = torch.randn(batch, 1, pixels, pixels, pixels, device=device)
    labels = torch.randint(0, 2, (batch, 1, pixels, pixels, pixels), device=device)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(images)
        loss = loss_function(outputs, labels)
        loss.backward()
        optimizer.step()
