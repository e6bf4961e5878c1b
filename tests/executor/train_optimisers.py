"""Optimisers and parameters of every sort.

    train_optimisers.py FOLDER KIND [--stop-at STEP]

KIND: sparse, sparse-sgd, lbfgs, freeze, unfreeze, or for `run.prepare` to refuse: lbfgs-prepared, two.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch

import penstock_executor as px

SAMPLES, BATCH = 40, 4


class Model(torch.nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(10, 4, sparse=sparse)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(index)).squeeze(1)


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(10, 4, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows(index).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--stop-at", type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    run = px.start(options.folder / "checkpoints")
    kind = options.kind
    model = Rows() if kind == "sparse" else Model(sparse=kind == "sparse-sgd")
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "sparse":
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
    elif kind.startswith("lbfgs"):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES) % 10, torch.arange(SAMPLES).double() / SAMPLES)
    whole = model
    if kind == "lbfgs":
        loader = run.loader(data, batch_size=BATCH)
        run.keep(model=model, optimizer=optimizer)
    else:
        if kind == "unfreeze":
            whole.rows.requires_grad_(requires_grad=False)
        given = [optimizer, optimizer] if kind == "two" else optimizer
        ddp = {"find_unused_parameters": True} if kind == "freeze" else None
        model, _, loader = run.prepare(model, given, data, batch_size=BATCH, ddp=ddp)
    for epoch in run.epochs(4):
        if epoch == 1 and kind in ("freeze", "unfreeze"):
            whole.rows.requires_grad_(kind == "unfreeze")
        for index, target in loader:
            if kind == "lbfgs":

                def closure(index: torch.Tensor = index, target: torch.Tensor = target) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = (model(index) - target).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                run.step_done()
            else:
                run.step((model(index) - target).square().mean())
            if run.steps == options.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
    if run.rank == 0:
        weights = {name: each.tolist() for name, each in whole.named_parameters()}
        (options.folder / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main()
