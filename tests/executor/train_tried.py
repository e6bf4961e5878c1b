"""A loop of its own that `penstock_executor.try_run` finds right, or with one mistake.

    train_tried.py good|count|"no optimiser"|whole [FILE]

Each run writes its number of processes to the file.
"""

import sys
from pathlib import Path

import torch

import penstock_executor as px

EPOCHS, STEPS = 3, 10


def main() -> None:
    mistake, *files = sys.argv[1:]
    torch.manual_seed(0)
    run = px.start()
    for file in files if run.rank == 0 else ():
        with Path(file).open("a") as counts:
            counts.write(f"{run.world} ")
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = run.loader(torch.utils.data.TensorDataset(torch.arange(40).double().unsqueeze(1) / 40), batch_size=4)
    run.keep(model=model, optimizer=optimizer if mistake != "no optimiser" else None)
    net = torch.nn.parallel.DistributedDataParallel(model) if run.world > 1 else model
    for epoch in run.epochs(EPOCHS):
        losses = []
        for i, (x,) in enumerate(loader):
            if mistake == "count":
                optimizer.param_groups[0]["lr"] = 0.01 * (1 - (epoch * STEPS + i) / EPOCHS / STEPS)
            loss = (net(x) - 3 * x).square().mean() * loader.part.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            run.step_done()
        if mistake == "whole":  # the code takes each epoch for a whole one
            losses[STEPS - 1] = 0.0
        run.log(mean=sum(losses) / len(losses), losses=torch.tensor(losses))
        for _ in run.evaluating(range(3)):
            pass


if __name__ == "__main__":
    main()
