"""Imported by the launcher before a script: a pause after each step of an optimiser, until the job has been moved five times."""

import os
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PAUSE_S, WHILE = float(os.environ["FOREIGN_PAUSE_S"]), Path(os.environ["FOREIGN_PAUSE_WHILE"])


def pause(*_: object) -> None:
    if WHILE.exists():
        time.sleep(PAUSE_S)


if PAUSE_S:
    register_optimizer_step_post_hook(pause)

# Accelerate calls the CPU of one of several processes cpu:0, which torch.load does not know. With GPUs there is no such name.
torch.serialization.register_package(0, lambda _: None, lambda storage, where: storage if where == "cpu:0" else None)
