"""A Lightning job that Slurm stops in the middle of an epoch, and that records the samples which it has seen.

    train_lightning.py FOLDER STEP [stateful]      # SIGTERM comes in this step of the first run

With a `DataLoader` and our sampler, or a `StatefulDataLoader` of torchdata, workers, AdamW and a schedule. The processes are
those that torchrun's variables say.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

import penstock_executor as px
from penstock_executor.integrations.lightning import PenstockCallback, sampler

SAMPLES, BATCH, EPOCHS = 96, 8, 2


class Line(LightningModule):
    """Learns y = x."""

    def __init__(self, folder: Path, stop: int):
        super().__init__()
        self.layer, self.folder, self.stop = torch.nn.Linear(1, 1), folder, stop

    def training_step(self, batch, _):
        (x,) = batch
        with (self.folder / "seen").open("a") as file:
            file.write("".join(f"{int(each)}\n" for each in x))
        if self.global_step == self.stop and self.trainer.ckpt_path is None:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.nn.functional.mse_loss(self.layer(x / SAMPLES), x / SAMPLES)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1))
    share = px.share(BATCH)
    if sys.argv[3:] == ["stateful"]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = StatefulDataLoader(samples, share, shuffle=True, num_workers=2)
    else:
        data = torch.utils.data.DataLoader(samples, share, sampler=sampler(samples), num_workers=2)
    penstock = PenstockCallback(folder, share)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=EPOCHS,
        callbacks=[penstock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(Line(folder, stop), data, ckpt_path=penstock.latest())
    (folder / "done").touch()


if __name__ == "__main__":
    main()
