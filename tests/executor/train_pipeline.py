"""A job with a pipeline of two stages as its model, each in a process, for `test_pipeline.py`.

    train_pipeline.py FOLDER [--sleep S] [--max-norm N] [--max-batch N] [--hold STEP] [--frozen]

Two micro-batches a step, by PyTorch's GPipe schedule. Writes a line of `FOLDER/steps.jsonl` for each step and process,
and at the end each stage's parameters.
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from train_elastic import Hold, Moons

import penstock_executor as px

SIZE, BATCH, EPOCHS, MICRO_BATCHES = 203, 32, 3, 2


def layers() -> torch.nn.Sequential:
    """The whole model."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(scores.squeeze(1), labels)


class Places(list):
    """The ranks of the processes that this was part of, in at most two runs."""

    def state_dict(self) -> dict:
        return {"places": list(self)}

    def load_state_dict(self, state: dict) -> None:
        self.extend(state["places"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--max-batch", type=int)
    parser.add_argument("--hold", type=int)
    parser.add_argument("--frozen", action="store_true", help="the second stage")
    options = parser.parse_args()
    logging.basicConfig(filename=options.folder / "log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    run = px.start(options.folder / "checkpoints", gpus_per_replica=2, report_every_s=0.3)
    hold = Hold(run, options.hold)
    whole = layers()
    if run.replica > 0:  # every replica begins as the first
        for parameter in whole.parameters():
            parameter.data.zero_()
    part = whole[:2] if run.place == 0 else whole[2:]
    if options.frozen and run.place == 1:
        part.requires_grad_(False)
    places = Places([run.place])
    try:
        part, _, loader = run.prepare(
            part,
            torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9),
            Moons(SIZE),
            batch_size=BATCH,
            max_batch_size=options.max_batch,
            lr_scaling="linear",
            max_grad_norm=options.max_norm,
            state={"places": places},
            drop_last=True,
        )
    except ValueError as error:
        logging.error("refused: %s", error)
        raise
    stage = PipelineStage(part, run.place, run.gpus_per_replica, run.device, group=run.replica_group)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
    record = os.open(options.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for epoch in run.epochs(EPOCHS):
        for indices, points, labels in loader:
            line = {"run": run.run_epoch, "epoch": epoch, "step": run.steps, "seen": indices.tolist()}
            if run.place == 0:
                os.write(record, (json.dumps(line | {"world": run.world, "batch": loader.size.total}) + "\n").encode())
                schedule.step(points.double())
            else:
                schedule.step(target=labels.double())
            time.sleep(options.sleep)
            hold.wait()
            run.step()
    if run.replica == 0:
        noise = run.noise
        assert noise is not None
        found = {"weights": part.state_dict(), "noise": (noise.grad_sqr, noise.grad_var), "steps": run.steps}
        found["places"] = list(places)
        torch.save(found, options.folder / f"final-{run.place}.pt")


if __name__ == "__main__":
    main()
