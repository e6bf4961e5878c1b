"""Muon for the matrices of a model and AdamW for the rest, in a loop of the script's own or with `prepare`.

    train_muon.py FOLDER [--prepare] [--hold STEP]

Writes a line to FOLDER/steps.jsonl in each step, and FOLDER/final.pt, as `train_elastic.py` does.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from train_elastic import Hold, Moons

import penstock_executor as px

BATCH, EPOCHS = 32, 2


class Both(torch.optim.Optimizer):
    """Two optimisers as one, for `prepare`: they share the groups and the state of this one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._share()

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--hold", type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = px.start(options.folder / "checkpoints", report_every_s=0.3)
    hold = Hold(run, options.hold)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    matrices = [each for each in model.parameters() if each.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW([each for each in model.parameters() if each.ndim != 2], lr=0.01)
    trained: torch.nn.Module = model
    data = Moons(503)
    if options.prepare:
        trained, _, loader = run.prepare(model, Both(muon, adamw), data, batch_size=BATCH, max_batch_size=4 * BATCH)
    else:
        loader = run.loader(data, batch_size=BATCH)
        run.keep(model=model, muon=muon, adamw=adamw)
        if run.world > 1:
            trained = DistributedDataParallel(model)
    loss_of = torch.nn.BCEWithLogitsLoss()
    record = os.open(options.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for epoch in run.epochs(EPOCHS):
        for indices, points, labels in loader:
            seen = indices.tolist() if loader.part.samples else []
            line = {"run": run.run_epoch, "epoch": epoch, "step": run.steps, "seen": seen, "world": run.world}
            os.write(record, (json.dumps(line) + "\n").encode())
            hold.wait()
            loss = loss_of(trained(points.double()).squeeze(1), labels.double())
            if options.prepare:
                run.step(loss)
                continue
            (loader.part.weight * loss).backward()
            for each in (muon, adamw):
                each.step()
                each.zero_grad()
            run.step_done()
    if run.rank == 0:
        noise = (run.noise.grad_sqr, run.noise.grad_var) if run.noise is not None else None
        state = {"weights": model.state_dict(), "steps": run.steps, "progress": run.progress, "noise": noise}
        torch.save(state, options.folder / "final.pt")


if __name__ == "__main__":
    main()
