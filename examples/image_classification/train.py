#!/usr/bin/env python3
"""Elastic image classification: a small convolutional network tells squares from crosses in noisy pictures.

    python train.py                                   on a laptop
    torchrun --nproc-per-node 2 train.py              two processes
    sbatch --adaptive --max-gpus=8 submit.sbatch      on Slurm with Penstock: 1 to 8 GPUs

The lines marked [1] to [4] make it elastic. It generates the pictures itself.
"""

import argparse
import logging

import torch

import penstock_executor as px


class Shapes(torch.utils.data.Dataset):
    """Pictures of 16 x 16: a square (0) or a cross (1) at a random place, with noise. An index always has the same
    picture."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        picture = 0.7 * torch.randn(1, 16, 16, generator=chance)
        x, y = torch.randint(0, 9, (2,), generator=chance).tolist()
        label = index % 2
        if label:
            picture[0, y + 3, x : x + 7] += 2
            picture[0, y : y + 7, x + 3] += 2
        else:
            picture[0, [y, y + 6], x : x + 7] += 2
            picture[0, y : y + 7, [x, x + 6]] += 2
        return picture, label


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--checkpoints")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(0)

    run = px.start(options.checkpoints)  # [1]
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(2),
    )
    model(torch.zeros(1, 1, 16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = run.prepare(  # [2]
        model, optimizer, Shapes(options.size), batch_size=64, max_batch_size=512, lr_scaling="adascale"
    )
    held_out = [Shapes(options.size + 1000)[index] for index in range(options.size, options.size + 1000)]
    pictures = torch.stack([picture for picture, _ in held_out]).to(run.device)
    labels = torch.tensor([label for _, label in held_out]).to(run.device)
    loss_of = torch.nn.CrossEntropyLoss()
    for _ in run.epochs(options.epochs):  # [3]
        for x, y in loader:
            run.step(loss_of(model(x.to(run.device)), y.to(run.device)))  # [4]
        with torch.no_grad():
            accuracy = float((model(pictures).argmax(1) == labels).float().mean())
        run.log(accuracy=round(accuracy, 4), batch=loader.size.total)


if __name__ == "__main__":
    main()
