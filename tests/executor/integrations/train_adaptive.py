"""A training of Hugging Face or Lightning whose batch grows, as a user would write it.

    train_adaptive.py LOOP FOLDER [--stop] [--memory N]      # LOOP: huggingface or lightning

With workers, AdamW, and a schedule that falls to 0 at the end. A step takes 10 ms and hardly longer with a larger batch,
and the targets are mostly noise, so that larger batches gain much. With --stop, Slurm's SIGTERM comes in mid-epoch, once
the batch has grown. With --memory, no more than N samples fit into the memory of a process. Each process appends its
steps to FOLDER/steps: the samples that it has seen, and the learning rate that moved the parameters. The processes are
those that torchrun's variables say.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

SAMPLES, BATCH, LARGEST, EPOCHS, RATE = 3001, 8, 64, 3, 0.01
# Accelerate calls the CPU of one of several processes cpu:0, which torch.load does not know.
torch.serialization.register_package(0, lambda _: None, lambda storage, where: storage if where == "cpu:0" else None)


class Samples(torch.utils.data.Dataset):
    """Vectors whose targets are mostly noise."""

    def __init__(self):
        torch.manual_seed(0)
        self.x = torch.randn(SAMPLES, 8)
        self.y = self.x.sum(1, keepdim=True) + 20 * torch.randn(SAMPLES, 1)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"index": torch.tensor(index), "x": self.x[index], "y": self.y[index]}


class Recorder:
    """Writes each step, and stops the job."""

    def __init__(self, folder: Path, stop: bool, memory: int):
        self.path, self.stop, self.seen, self.steps = folder / "steps", stop, [], 0
        self.run, self.memory = 1 if stop else 2, memory

    def saw(self, index: torch.Tensor) -> None:
        if len(index) > self.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory with {len(index)} samples")
        self.seen = index.tolist()
        time.sleep(0.01)

    def validated(self, epoch: int) -> None:
        with (self.path.parent / "validated").open("a") as file:
            file.write(f"{epoch}\n")

    def moved(self, rate: float) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"run": self.run, "step": self.steps, "seen": self.seen, "rate": rate}) + "\n")
        self.steps += 1
        if self.stop and len(self.seen) > BATCH:
            self.stop = False
            os.kill(os.getpid(), signal.SIGTERM)


class Adam(torch.optim.AdamW):
    """Records the learning rate of each step."""

    def __init__(self, parameters, recorder: Recorder):
        super().__init__(parameters, lr=RATE)
        self.recorder = recorder

    def step(self, closure=None):
        value = super().step(closure)
        self.recorder.moved(self.param_groups[0]["lr"])
        return value


def falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def huggingface(folder: Path, recorder: Recorder) -> int:
    from transformers import TrainingArguments

    from penstock_executor.integrations.huggingface import ElasticTrainer, PenstockCallback, latest_checkpoint

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, index, x, y):
            if self.training:
                recorder.saw(index)
            else:
                recorder.validated(trainer.state.epoch)
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}

    class Mine(ElasticTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = Adam(self.model.parameters(), recorder)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = falling(self.optimizer, num_training_steps)
            return self.lr_scheduler

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        use_cpu=True,
        save_strategy="no",
        eval_strategy="epoch",
        logging_steps=50,
        remove_unused_columns=False,
        dataloader_num_workers=2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Mine(
        Line(),
        arguments,
        train_dataset=Samples(),
        eval_dataset=torch.utils.data.Subset(Samples(), [0]),
        batch_size=BATCH,
        max_batch_size=LARGEST,
        penstock=PenstockCallback(report_every_s=0.3),
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder))
    return trainer.state.global_step


def lightning(folder: Path, recorder: Recorder) -> int:
    from lightning.pytorch import LightningModule, Trainer

    from penstock_executor.integrations.lightning import AdaptiveBatch, PenstockCallback

    class Line(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, _):
            recorder.saw(batch["index"])
            return torch.nn.functional.mse_loss(self.layer(batch["x"]), batch["y"])

        def validation_step(self, batch, _):
            if not self.trainer.sanity_checking:
                recorder.validated(self.trainer.current_epoch)

        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), recorder)
            schedule = falling(optimizer, self.trainer.estimated_stepping_batches)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    batch = AdaptiveBatch(Samples(), BATCH, LARGEST, num_workers=2)
    penstock = PenstockCallback(folder, batch, report_every_s=0.3)
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
    validation = torch.utils.data.DataLoader(torch.utils.data.Subset(Samples(), [0]))
    trainer.fit(Line(), batch.loader, validation, ckpt_path=penstock.latest())
    return batch.steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=["huggingface", "lightning"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--memory", type=int, default=LARGEST)
    options = parser.parse_args()
    loop = {"huggingface": huggingface, "lightning": lightning}[options.loop]
    steps = loop(options.folder, Recorder(options.folder, options.stop, options.memory))
    (options.folder / "done").write_text(str(steps))


if __name__ == "__main__":
    main()
