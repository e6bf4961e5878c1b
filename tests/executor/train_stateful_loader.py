"""A loop of the script's own, with torchdata's `StatefulDataLoader`, whose state is kept.

train_stateful_loader.py FOLDER      # SIGTERM comes in step 14 of the first run
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock_executor as px

SAMPLES, BATCH = 80, 8


def main() -> None:
    folder = Path(sys.argv[1])
    run = px.start(folder / "checkpoints")
    loader = StatefulDataLoader(range(SAMPLES), BATCH, shuffle=True, num_workers=2)
    continues = run.keep(model=torch.nn.Linear(1, 1), loader=loader)
    for _ in run.epochs(3):
        for batch in loader:
            with (folder / "seen").open("a") as file:
                file.write("".join(f"{each}\n" for each in batch.tolist()))
            if run.steps == 14 and not continues:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step_done(BATCH)


if __name__ == "__main__":
    main()
