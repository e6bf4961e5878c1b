"""What real scripts have around the step: averages of an epoch, an evaluation after it, accumulation in a loop of their own.

    train_around.py FOLDER [--accumulate K] [--stop-in EPOCH.PLACE] [--finish | --break] [--count] [--by-number]
                    [--sampler]

The place is a step of the epoch, or `evaluation`: the process sends itself SIGTERM there, once in all runs.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

import penstock_executor as px

SAMPLES = 40


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stop-in", action="append", default=[])
    parser.add_argument("--kill", action="store_true", help="SIGKILL in place of SIGTERM")
    parser.add_argument("--handler", action="store_true", help="a handler of SIGTERM of the script's own")
    parser.add_argument("--finish", action="store_true", help="end in the second of three epochs")
    parser.add_argument("--break", action="store_true", dest="leaves", help="likewise, without run.finish()")
    parser.add_argument("--count", action="store_true", help="count batches from 0")
    parser.add_argument(
        "--by-number", action="store_true", help="a learning rate that follows from the number of the batch"
    )
    parser.add_argument("--sampler", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    run = px.start(options.folder / "checkpoints")
    if options.handler:
        signal.signal(signal.SIGTERM, lambda *_: None)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES).double().unsqueeze(1) / SAMPLES)
    sampler = torch.utils.data.WeightedRandomSampler(range(1, SAMPLES + 1), 36) if options.sampler else None
    loader = run.loader(data, batch_size=4, sampler=sampler)
    run.keep(model=model, optimizer=optimizer)

    def stop_in(place: str) -> None:
        mark = options.folder / f"stopped-{place}"
        if place in options.stop_in and not mark.exists():
            mark.touch()
            while options.kill and not any((options.folder / "checkpoints").rglob("*.ckpt")):
                time.sleep(0.01)  # it is being written
            os.kill(os.getpid(), signal.SIGKILL if options.kill else signal.SIGTERM)

    def note(**values: object) -> None:
        with (options.folder / "noted.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    for epoch in run.epochs(3):
        losses = []
        for i, (x,) in enumerate(loader) if options.count else enumerate(loader, loader.first):
            if options.by_number:
                optimizer.param_groups[0]["lr"] = 0.02 * (1 - (epoch + i / 10) / 3)
                note(epoch=epoch, rate=optimizer.param_groups[0]["lr"])
            if i % options.accumulate == 0:
                optimizer.zero_grad()
            loss = (model(x) - 3 * x).square().mean() / options.accumulate
            loss.backward()
            losses.append(float(loss))
            if (i + 1) % options.accumulate == 0:
                optimizer.step()
                note(epoch=epoch, batch=i, samples=x.squeeze(1).mul(SAMPLES).round().int().tolist())
                stop_in(f"{epoch}.{run.epoch_steps}")
                run.step_done()
        note(epoch=epoch, mean=sum(losses) / len(losses))
        stop_in(f"{epoch}.evaluation")
        note(epoch=epoch, evaluated=True)
        if epoch == 1 and options.finish:
            run.finish()
        if epoch == 1 and (options.finish or options.leaves):
            break
    (options.folder / "weights.json").write_text(json.dumps([float(each) for each in model.parameters()]))


if __name__ == "__main__":
    main()
