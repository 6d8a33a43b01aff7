"""Two steps of Lightning's demo transformer (lightning.pytorch.demos), with its Trainer.

Configuration: WikiText-2's vocabulary of 33,278 words, 20 sequences of 35 tokens, as its example.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import Transformer
from torch.nn import functional

SIZES = {"batch": 20, "tokens": 35, "words": 33_278}
SMALL = {"batch": 4, "tokens": 16, "words": 1_024}


class LanguageModel(pl.LightningModule):
    def __init__(self, words):
        super().__init__()
        self.model = Transformer(vocab_size=words)

    def training_step(self, batch, batch_index):
        inputs, target = batch
        output = self.model(inputs, target)
        return functional.nll_loss(output, target.view(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(device, batch, tokens, words):
    text = torch.arange(batch * 2 * tokens).remainder(words).view(-1, tokens)
    rows = torch.utils.data.TensorDataset(text, text)
    trainer = pl.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        max_steps=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(words), torch.utils.data.DataLoader(rows, batch_size=batch))
