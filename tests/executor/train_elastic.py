"""An elastic training job for the tests: a small network on generated data, with a record of the samples it has seen.

    train_elastic.py FOLDER [--option VALUE ...]

Each process writes a line to `FOLDER/steps.jsonl` before each step counts: the run's epoch, the optimiser step and the samples.
The test decides from the surviving checkpoints which lines count.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

import penstock_executor as px
from penstock_executor.training import short_of_memory
from penstock_executor.training.suspension import Suspension


class Moons(torch.utils.data.Dataset):
    """Two noisy half circles, with each sample's index."""

    def __init__(self, size: int) -> None:
        chance = torch.Generator().manual_seed(1)
        self.labels = torch.arange(size) % 2
        angle = torch.rand(size, generator=chance) * torch.pi
        x = torch.cos(angle) + self.labels
        y = torch.sin(angle) * (1 - 2 * self.labels) + self.labels / 2
        self.points = torch.stack([x, y], 1) + 0.2 * torch.randn(size, 2, generator=chance)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return index, self.points[index], self.labels[index].float()


class Hold:
    """Holds process 1 of a run, or its only one, in a step until it has received SIGTERM, and with it the other processes.

    Create it after `px.start`.
    """

    def __init__(self, run: px.TrainingRun, step: int | None) -> None:
        self._run, self._step, self._heard = run, step, False
        self._before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._on_term)

    def wait(self) -> None:
        held = self._run.rank == min(1, self._run.world - 1) and self._run.steps == self._step
        if held:
            print(f"held in step {self._step}", file=sys.stderr, flush=True)
        while held and not self._heard:
            time.sleep(0.01)

    def _on_term(self, *arguments) -> None:
        self._before(*arguments)
        self._heard = True


class Meter:
    """An object of the script's own, whose state is NumPy's."""

    def __init__(self) -> None:
        self.best, self.seen = np.float32(0), np.zeros(3)

    def state_dict(self) -> dict:
        return {"best": self.best, "seen": self.seen, "of": {np.int64(1): (np.float64(0.5), True)}}

    def load_state_dict(self, state: dict) -> None:
        assert (type(state["best"]), type(state["seen"]), state["of"]) == (float, np.ndarray, {1: (0.5, True)})
        self.best, self.seen = state["best"], state["seen"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=1003)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-batch", type=int)
    parser.add_argument("--max-atomic", type=int)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per step, until FOLDER/fast exists")
    parser.add_argument("--hold", type=int, metavar="STEP")
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--report-every", type=float, default=0.3)
    parser.add_argument("--checkpoint-every", type=float, default=600)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--memory", type=int, help="samples of one process that fit")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--validation-workers", type=int, metavar="W", help="of a loader of the script's own")
    parser.add_argument("--numpy", action="store_true", help="a learning rate and a state of NumPy")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--fail", type=int, metavar="STEP")
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="fail by SIGKILL")
    parser.add_argument("--average", action="store_true", help="a moving average, updated after run.step")
    parser.add_argument("--unused", action="store_true", help="each step uses one half of the model")
    parser.add_argument("--ddp", type=json.loads, help="arguments of DistributedDataParallel")
    parser.add_argument("--clip", type=float, help="max_grad_norm")
    parser.add_argument("--compile", action="store_true", help="with dynamo, and PyTorch's own kernels")
    parser.add_argument("--release", action="store_true", help="a suspended run releases its memory on the CPU")
    parser.add_argument(
        "--last-is-short", type=int, metavar="N", help="only the last process sees a note that N do not fit"
    )
    parser.add_argument("--note-reading", action="store_true", help="write to FOLDER/read who opens a checkpoint")
    return parser.parse_args()


class Halves(torch.nn.Module):
    """Each forward pass uses one of two halves, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += self.training
        return self.halves[self.step % 2](x)


def note_reading(run: px.TrainingRun, folder: Path) -> None:
    """From now on, note each process that opens a checkpoint to read it."""

    def audit(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(".ckpt") and "r" in (arguments[1] or ""):
            with (folder / "read").open("a") as file:
                file.write(f"{run.rank}\n")

    sys.addaudithook(audit)


def make(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = [torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
    if options.dropout:
        layers.insert(2, torch.nn.Dropout(options.dropout))
    model = Halves().double() if options.unused else torch.nn.Sequential(*layers).double()
    if options.sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    if options.optimizer == "sgd":
        rate = np.float64(0.05) if options.numpy else 0.05
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    return model, optimizer


def start(options: argparse.Namespace) -> tuple[px.TrainingRun, Hold]:
    run = px.start(
        options.folder / "checkpoints",
        report_every_s=options.report_every,
        checkpoint_every_s=options.checkpoint_every,
    )
    hold = Hold(run, options.hold)
    if options.release:
        run._suspension = Suspension(device="cpu")
    if options.last_is_short and run.rank == run.world - 1:
        short_of_memory.noted = lambda _: {"cpu": options.last_is_short}
    if options.note_reading:
        note_reading(run, options.folder)
    return run, hold


def fail_if_asked(options: argparse.Namespace, run: px.TrainingRun) -> None:
    if run.steps == options.fail and run.rank == options.fail_rank:
        if options.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("as asked")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run, hold = start(options)
    model, optimizer = make(options)
    data = Moons(options.size)
    bare, average = model, torch.optim.swa_utils.AveragedModel(model) if options.average else None
    if options.compile:
        model = torch.compile(model, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if options.scaler else None
    model, optimizer, loader = run.prepare(
        model,
        optimizer,
        data,
        batch_size=options.batch,
        max_batch_size=options.max_batch,
        max_atomic_batch=options.max_atomic,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.9),
        scaler=scaler,
        state={"meter": Meter() if options.numpy else None, "average": average},
        ddp=options.ddp,
        max_grad_norm=options.clip,
        drop_last=options.drop_last,
        num_workers=options.workers,
    )
    loss_of = torch.nn.BCEWithLogitsLoss()

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            reached = float(loss_of(model(data.points.double()).squeeze(1), data.labels.double()))
        model.train()
        return reached

    validation = None
    if options.validation_workers:
        validation = torch.utils.data.DataLoader(
            data, 64, num_workers=options.validation_workers, persistent_workers=True
        )
    record = os.open(options.folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    for epoch in run.epochs(options.epochs):
        if validation is not None:
            assert sum(len(labels) for _, _, labels in validation) == options.size
        for indices, points, labels in loader:
            part = loader.part
            seen = indices.tolist() if part.samples else []
            line = {"attempt": int(attempt), "run": run.run_epoch, "epoch": epoch, "step": run.steps, "seen": seen}
            os.write(record, (json.dumps(line | {"world": run.world, "batch": loader.size.total}) + "\n").encode())
            loss = loss_of(model(points.double()).squeeze(1), labels.double())
            if options.memory and len(points) > options.memory:
                raise MemoryError(f"{len(points)} samples")
            if options.sleep and not (options.folder / "fast").exists():
                time.sleep(options.sleep)
            hold.wait()
            fail_if_asked(options, run)
            run.step(loss)
            if average is not None:
                average.update_parameters(bare)
        run.report(evaluate(), minimize=True)
    loss = evaluate()
    whole = {name: value.full_tensor() if options.sharded else value for name, value in model.state_dict().items()}
    if run.rank == 0:
        weights = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in whole.items()}
        if average is not None:
            weights |= {f"average.{name}": value for name, value in average.state_dict().items()}
        beside = options.folder / "final.tmp"
        torch.save({"loss": loss, "weights": weights, "steps": run.steps, "progress": run.progress}, beside)
        beside.rename(options.folder / "final.pt")


if __name__ == "__main__":
    main()
