"""A script that starts in one of the ways of `train_launched.py FOLDER plain|spawn|initialised`.

plain: one process that calls a barrier. spawn: two processes by torch.multiprocessing. initialised: these have joined a group
before px.start.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import penstock_executor as px


def train(rank: int, folder: Path, way: str) -> None:
    if way == "initialised":
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    run = px.start(folder / "checkpoints")
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4)
    for _ in run.epochs(1):
        for (x,) in loader:
            run.step(model(x).square().mean())
        dist.barrier()
        (folder / f"trained-{os.getpid()}").touch()


if __name__ == "__main__":
    folder, way = Path(sys.argv[1]), sys.argv[2]
    if way == "plain":
        train(0, folder, way)
    else:
        mp.spawn(train, (folder, way), nprocs=2)
