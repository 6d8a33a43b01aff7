"""Draw the pictures of the report's page from sessions: ``python tests/docs/draw_images.py``.

It needs Chromium and Pillow. Look at the pictures before you commit them.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from PIL import Image, ImageChops

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT = 1200, 1170
TRAINING = """
import torch

LOSSES = []


def attend(query, key):
    scores = query @ key.transpose(-2, -1)
    weights = torch.softmax(scores / query.shape[-1] ** 0.5, dim=-1)
    return torch.dropout(weights, 0.1, True) @ query


def train(model, batches):
    for images in batches:
        LOSSES.append(model(images).square().mean())
"""
TESTS = """
import pytest
import torch
from training import attend, train


@pytest.mark.max_peak_mb(40)
@pytest.mark.parametrize("length", [256, 1024])
def test_attention_fits(cka_memory, length):
    query, key = torch.ones(2, 16, length, 64)
    with cka_memory.measure():
        attend(query, key)


@pytest.mark.flat_per_batch
def test_training_does_not_grow(cka_memory):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU())
    batches = [torch.ones(64, 1024) for _ in range(12)]
    with cka_memory.measure() as region:
        train(model, region.batches(batches))
"""
STEPS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 1000)

    def forward(self, tokens):
        return self.head(self.encoder(tokens))


def test_three_steps(cka_memory):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    with cka_memory.measure() as region:
        for tokens in region.batches([torch.ones(16, 32, 64)] * 3):
            logits = model(tokens)
            logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(logits.detach())
"""
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    f"--window-size={WIDTH},{HEIGHT}",
)


class Picture(NamedTuple):
    """A picture of a session's page."""

    name: str
    files: dict[str, str]
    options: tuple[str, ...]
    status: int
    """The exit status of pytest."""
    hidden: str
    """What is left out, as a selector of CSS."""


PICTURES = (
    # What the table is filtered and sorted with does nothing in a picture.
    Picture(
        "report-problems.png",
        {"training.py": TRAINING, "test_training.py": TESTS},
        (),
        1,
        "#controls",
    ),
    Picture(
        "memory-over-time.png",
        {"test_steps.py": STEPS},
        ("--cka-memory-timeline",),
        0,
        "header, main > section:not(#over-time), #tl-form, body > section:not(#over-time)",
    ),
)


def draw(picture: Picture) -> None:
    """Run a session, open its page in Chromium, and write what is not hidden to a file."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed")
    with TemporaryDirectory() as folder:
        for name, text in picture.files.items():
            Path(folder, name).write_text(text, "utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--cka-memory-html=page.html"]
        plugins = ("-p", "no:cacheprovider", "-p", "no:randomly")
        done = subprocess.run([*command, *plugins, *picture.options], cwd=folder, check=False)
        if done.returncode != picture.status:
            sys.exit(f"pytest should have ended with {picture.status}, not {done.returncode}")
        page = Path(folder, "page.html")
        style = f"<style>{picture.hidden} {{display:none}}</style></head>"
        page.write_text(page.read_text("utf-8").replace("</head>", style, 1), "utf-8")
        shot = Path(folder, "page.png")
        flags = (*_FLAGS, f"--user-data-dir={folder}/profile", f"--screenshot={shot}")
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)
        image = _without_empty_end(Image.open(shot).convert("RGB"))
        image.save(IMAGES / picture.name, optimize=True)


def _without_empty_end(image: Image.Image) -> Image.Image:
    paper = Image.new("RGB", image.size, image.getpixel((0, 0)))
    *_, bottom = ImageChops.difference(image, paper).getbbox() or (0, 0, 0, HEIGHT)
    return image.crop((0, 0, WIDTH, min(bottom + 20, HEIGHT))).quantize(64)


if __name__ == "__main__":
    for picture in PICTURES:
        draw(picture)
