"""One step of the unconditional training tutorial of diffusers: a UNet2DModel of 128 pixels.

Configuration: docs/source/en/tutorials/basic_training.md, 16 images, AdamW.
"""

import torch

SIZES = {"batch": 16, "pixels": 128, "channels": (128, 128, 256, 256, 512, 512)}
SMALL = {"batch": 4, "pixels": 32, "channels": (32, 32, 32, 32, 32, 32)}


def step(device, batch, pixels, channels):
    from diffusers import DDPMScheduler, UNet2DModel  # it asks the device

    model = UNet2DModel(
        sample_size=pixels,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=channels,
        down_block_types=(*("DownBlock2D",) * 4, "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", *("UpBlock2D",) * 4),
    ).to(device)
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    for _ in range(2):
        noise = torch.randn(images.shape, device=device)
        timesteps = torch.randint(0, 1000, (batch,), device=device)
        noisy = scheduler.add_noise(images, noise, timesteps)
        predicted = model(noisy, timesteps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
