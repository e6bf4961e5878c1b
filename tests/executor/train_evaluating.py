"""A training that evaluates with `run.evaluating`, after the inner loop or in mid-epoch, on one or several processes.

    train_evaluating.py FOLDER [--own] [--in-epoch] [--together] [--stop-in EPOCH] [--hold]

Process r evaluates 4 r + 3 batches, or with `--together` each evaluates 5 and they add up the loss of every batch. With
`--stop-in` the last process sends itself SIGTERM in the third batch of that epoch's evaluation, once in all runs.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import penstock_executor as px

SAMPLES, BATCH = 40, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--own", action="store_true", help="a loop without run.prepare")
    parser.add_argument("--in-epoch", action="store_true", help="evaluate after the fifth step")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--stop-in", type=int)
    parser.add_argument("--hold", action="store_true", help="the first evaluation ends when FOLDER/released exists")
    return parser.parse_args()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """As DDP and `run.step` do it."""
    optimizer.zero_grad()
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()
    optimizer.step()


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    run = px.start(options.folder / "checkpoints")
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES).double().unsqueeze(1) / SAMPLES)
    if options.own:
        loader = run.loader(data, batch_size=BATCH)
        run.keep(model=model, optimizer=optimizer)
    else:
        model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=BATCH)

    def note(**values: object) -> None:
        with (options.folder / f"noted-{run.rank}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def evaluate(epoch: int) -> None:
        mark, released = options.folder / "stopped", options.folder / "released"
        if options.hold and epoch == 0:
            for _ in run.evaluating(iter(released.exists, True)):
                time.sleep(0.01)
            return
        for number in run.evaluating(range(5 if options.together else 4 * run.rank + 3)):
            if options.together:
                dist.all_reduce(torch.zeros(1))
            note(epoch=epoch, evaluates=number)
            if number == 2 and epoch == options.stop_in and run.rank == run.world - 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGTERM)
        note(epoch=epoch, evaluated=True)

    for epoch in run.epochs(3):
        losses = []
        for (x,) in loader:
            loss = (model(x) - 3 * x).square().mean()
            if options.own:
                step(model, optimizer, loss * loader.part.weight)
                run.step_done()
            else:
                run.step(loss)
            losses.append(float(loss))
            note(epoch=epoch, step=run.epoch_steps)
            if options.in_epoch and run.epoch_steps == 5:
                evaluate(epoch)
        note(epoch=epoch, mean=sum(losses) / len(losses))
        if not options.in_epoch:
            evaluate(epoch)
    if run.rank == 0:
        bare = getattr(model, "module", model)
        (options.folder / "weights.json").write_text(json.dumps([float(each) for each in bare.parameters()]))


if __name__ == "__main__":
    main()
