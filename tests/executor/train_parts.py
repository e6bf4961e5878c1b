"""A stream of which each process reads only its part: the shards are dealt to a fixed number of parts, and the parts to
the processes.

    train_parts.py FOLDER [--datasets] [--hold STEP]      # --datasets: by split_dataset_by_node of Hugging Face

Each process appends to FOLDER/steps.jsonl the samples that it has seen, and to FOLDER/read the shards that it has opened.
"""

import argparse
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from train_elastic import Hold

import penstock_executor as px

SHARDS, OF_SHARD = 8, 15
PARTS, EACH, EPOCHS = 4, 3, 2  # a step takes EACH samples of each part; the number of processes divides PARTS
STEPS = SHARDS * OF_SHARD // (PARTS * EACH)  # of an epoch


class Shards:
    """Numbered samples in SHARDS shards."""

    def __init__(self, opened: Path, who: str) -> None:
        self.opened, self.who = opened, who

    def read(self, shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            with self.opened.open("a") as file:
                file.write(f"{self.who} {shard}\n")
            for number in range(OF_SHARD):
                yield {"number": shard * OF_SHARD + number}

    def part(self, part: int, start: int) -> Iterator[dict[str, int]]:
        """One of PARTS parts, from its sample `start` on."""
        return islice(self.read(list(range(part, SHARDS, PARTS))), start, None)


class SplitDataset(Shards):
    """The same by an iterable data set of Hugging Face."""

    def part(self, part: int, start: int) -> Iterator[dict[str, int]]:
        from datasets import IterableDataset
        from datasets.distributed import split_dataset_by_node

        whole = IterableDataset.from_generator(self.read, gen_kwargs={"shards": list(range(SHARDS))})
        return iter(split_dataset_by_node(whole, part, PARTS).skip(start))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--datasets", action="store_true")
    parser.add_argument("--hold", type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = px.start(options.folder / "checkpoints", report_every_s=0.3)
    hold = Hold(run, options.hold)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    trained = DistributedDataParallel(model) if run.world > 1 else model
    data = (SplitDataset if options.datasets else Shards)(options.folder / "read", f"{run.world} {run.rank}")
    record = os.open(options.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for epoch in run.epochs(EPOCHS):
        parts = [data.part(part, run.epoch_steps * EACH) for part in range(run.rank, PARTS, run.world)]
        for _ in range(run.epoch_steps, STEPS):
            seen = [sample["number"] for part in parts for sample in islice(part, EACH)]
            line = {"run": run.run_epoch, "epoch": epoch, "step": run.steps, "seen": seen, "world": run.world}
            os.write(record, (json.dumps(line) + "\n").encode())
            hold.wait()
            x = torch.tensor(seen, dtype=torch.float64).unsqueeze(1) / (SHARDS * OF_SHARD)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(trained(x), 3 * x).backward()
            optimizer.step()
            run.step_done(PARTS * EACH)
    if run.rank == 0:
        torch.save(
            {"weights": model.state_dict(), "steps": run.steps, "progress": run.progress}, options.folder / "final.pt"
        )


if __name__ == "__main__":
    main()
