#!/usr/bin/env python3
"""A small regression with PyTorch Lightning: reports, checkpoints on request, clean stops.

    pip install lightning
    python train.py

Penstock needs only the lines marked [1] to [3].
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer

from penstock_executor.integrations.lightning import PenstockCallback  # [1]

BATCH = 32


class Sine(LightningModule):
    """Learns y = sin(3 x)."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch, _):
        """Mean squared error."""
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints-lightning")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 2048).unsqueeze(1)
    samples = torch.utils.data.TensorDataset(x, torch.sin(3 * x))
    data = torch.utils.data.DataLoader(samples, BATCH, shuffle=True, num_workers=options.workers)
    penstock = PenstockCallback(options.checkpoints, BATCH, report_every_s=5)  # [2]
    trainer = Trainer(
        max_epochs=options.epochs,
        callbacks=[penstock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=options.checkpoints,
    )
    trainer.fit(Sine(), data, ckpt_path=penstock.latest())  # [3]


if __name__ == "__main__":
    main()
