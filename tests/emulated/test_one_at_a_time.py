"""Two models of 1.6 billion parameters are compared on a card of 8 GB, one at a time."""

import json

PROGRAM = """
import json, sys, warnings
import torch
from torch import nn
from cka import compare_features, save_features

WIDTH, LAYERS = 2304, 24
folder = sys.argv[1]


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("cuda"):
            self.embedding = nn.Embedding(32000, WIDTH)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 18, 4 * WIDTH, batch_first=True)
                for _ in range(LAYERS)
            )

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


mask = (torch.arange(128) < torch.linspace(20, 128, 16)[:, None]).long()
batch = {"input_ids": torch.zeros(16, 128, dtype=torch.long), "attention_mask": mask}
peaks = []
for name in ("one", "other"):
    torch.cuda.reset_peak_memory_stats()
    save_features(Language, [batch, batch], f"{folder}/{name}", layers=["embedding", "layers.*"],
                  pooling="mean", device="cuda", progress=False)
    peaks.append(torch.cuda.max_memory_allocated())
left = torch.cuda.memory_allocated()
first = Language()
weights = sum(each.numel() * each.itemsize for each in first.parameters())
try:
    second = Language()
    both_fit = True
except torch.OutOfMemoryError:
    both_fit = False
warnings.simplefilter("ignore")  # a device without values has the same output for all samples
shape = list(compare_features(f"{folder}/one", f"{folder}/other").matrix.shape)
print(json.dumps({"peaks": peaks, "left": left, "weights": weights, "both_fit": both_fit,
                  "shape": shape}))
"""


def test_models_that_do_not_fit_together_are_compared(python, tmp_path):
    """The peak is that of one model and its forward pass; both models together do not fit."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    options = ("--memory", "8GB", "--no-values")
    words = ("-m", "emulated_cuda", *options, str(program), str(tmp_path))
    done = python(*words, forked_children=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    found = json.loads(lines[0])
    assert found["shape"] == [25, 25]
    assert not found["both_fit"]
    assert found["left"] < 2**24
    for peak in found["peaks"]:
        # A forward pass of 16 x 128 tokens takes a quarter of a GB.
        assert found["weights"] < peak < found["weights"] + 2**28
