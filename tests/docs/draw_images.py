"""Draw the picture of the README from a session: ``python tests/docs/draw_images.py``.

It needs Chromium and Pillow. Look at the picture before you commit it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

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
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    f"--window-size={WIDTH},{HEIGHT}",
)


def draw(target: Path) -> None:
    """Run the session, open its page in Chromium, and write the problems of the page to a file."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed")
    with TemporaryDirectory() as folder:
        Path(folder, "training.py").write_text(TRAINING, "utf-8")
        Path(folder, "test_training.py").write_text(TESTS, "utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        done = subprocess.run([*command, "--cka-memory-html=page.html"], cwd=folder, check=False)
        if done.returncode != 1:
            sys.exit("tests of the session should have failed")
        page = Path(folder, "page.html")
        html = page.read_text("utf-8")
        # What the table is filtered and sorted with is left out: it does nothing in a picture.
        page.write_text(re.sub(r"</head>", "<style>#controls{display:none}</style></head>", html))
        picture = Path(folder, "page.png")
        flags = (*_FLAGS, f"--user-data-dir={folder}/profile", f"--screenshot={picture}")
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)
        _without_empty_end(Image.open(picture).convert("RGB")).save(target, optimize=True)


def _without_empty_end(image: Image.Image) -> Image.Image:
    paper = Image.new("RGB", image.size, image.getpixel((0, 0)))
    *_, bottom = ImageChops.difference(image, paper).getbbox() or (0, 0, 0, HEIGHT)
    return image.crop((0, 0, WIDTH, min(bottom + 20, HEIGHT))).quantize(64)


if __name__ == "__main__":
    draw(IMAGES / "report-problems.png")
