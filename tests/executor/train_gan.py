"""A loop of the script's own, on the core alone: two models, two optimisers and a moving average.

    train_gan.py FOLDER [--epochs N] [--hold STEP] [--workers W] [--sharded] [--keep TIMES]

Writes a line to FOLDER/steps.jsonl in each step, and FOLDER/final.pt, as `train_elastic.py` does.
"""

import argparse
import copy
import json
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from train_elastic import Hold, Moons

import penstock_executor as px

BATCH = 32


class Samples(Moons):
    """Points, and for each what the generator makes its point of: the loss does not depend on which process has it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.noise = torch.randn(size, 2, generator=torch.Generator().manual_seed(3))

    def __getitem__(self, index: int):
        return index, self.points[index].double(), self.noise[index].double()


def network(outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)).double()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--hold", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--keep", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = px.start(options.folder / "checkpoints", report_every_s=0.3)
    hold = Hold(run, options.hold)
    maker, judge = network(2), network(1)
    average = copy.deepcopy(maker)
    if options.sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(maker)
    maker_steps = torch.optim.Adam(maker.parameters(), lr=0.01)
    judge_steps = torch.optim.AdamW(judge.parameters(), lr=0.02)
    loader = run.loader(Samples(203), batch_size=BATCH, num_workers=options.workers)
    for _ in range(options.keep):
        run.keep(maker=maker, judge=judge, maker_steps=maker_steps, judge_steps=judge_steps, average=average)
    if run.world > 1:
        maker, judge = DistributedDataParallel(maker), DistributedDataParallel(judge)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    record = os.open(options.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for epoch in run.epochs(options.epochs):
        for indices, real, noise in loader:
            seen = indices.tolist() if loader.part.samples else []
            line = {"run": run.run_epoch, "epoch": epoch, "step": run.steps, "seen": seen, "world": run.world}
            os.write(record, (json.dumps(line) + "\n").encode())
            hold.wait()
            weight, ones = loader.part.weight, torch.ones(len(real), 1, dtype=torch.float64)
            judge_steps.zero_grad()
            judged = judge(torch.cat([real, maker(noise).detach()]))
            (weight * loss_of(judged, torch.cat([ones, 0 * ones]))).backward()
            judge_steps.step()
            judge.requires_grad_(False)
            maker_steps.zero_grad()
            (weight * loss_of(judge(maker(noise)), ones)).backward()
            maker_steps.step()
            judge.requires_grad_(True)
            with torch.no_grad():
                for mean, now in zip(average.parameters(), maker.parameters(), strict=True):
                    mean.lerp_(now, 0.1)
            run.step_done()
        run.report(float(len(loader)))
    if run.rank == 0:
        models = {"maker": maker, "judge": judge, "average": average}
        weights = {
            f"{name}.{key.removeprefix('module.')}": value
            for name, model in models.items()
            for key, value in model.state_dict().items()
        }
        torch.save({"weights": weights, "steps": run.steps, "progress": run.progress}, options.folder / "final.pt")


if __name__ == "__main__":
    main()
