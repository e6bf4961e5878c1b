"""A Trainer of Hugging Face that Slurm stops in the middle of an epoch, and that records the samples which it has seen.

    train_huggingface.py FOLDER STEP      # SIGTERM comes in this step of the first run

The processes are those that torchrun's variables say.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import penstock_executor as px
from penstock_executor.integrations.huggingface import PenstockCallback, latest_checkpoint

SAMPLES, BATCH, EPOCHS = 96, 8, 2
# Accelerate calls the CPU of one of several processes cpu:0, which torch.load does not know.
torch.serialization.register_package(0, lambda _: None, lambda storage, where: storage if where == "cpu:0" else None)


class Samples(torch.utils.data.Dataset):
    """The numbers from 0 on."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)])}


class Line(torch.nn.Module):
    """Learns y = x."""

    def __init__(self, folder: Path, stop: int):
        super().__init__()
        self.layer, self.folder, self.stop, self.steps = torch.nn.Linear(1, 1), folder, stop, 0

    def forward(self, x, **_):
        with (self.folder / "seen").open("a") as file:
            file.write("".join(f"{int(each)}\n" for each in x))
        if self.steps == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        self.steps += 1
        return {"loss": torch.nn.functional.mse_loss(self.layer(x / SAMPLES), x / SAMPLES)}


def main() -> None:
    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=px.share(BATCH),
        use_cpu=True,
        save_strategy="no",
        remove_unused_columns=False,
        dataloader_num_workers=2,
        report_to=[],
        disable_tqdm=True,
    )
    checkpoint = latest_checkpoint(folder)
    model = Line(folder, -1 if checkpoint else stop)
    trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=[PenstockCallback()])
    trainer.train(resume_from_checkpoint=checkpoint)
    (folder / "done").touch()


if __name__ == "__main__":
    main()
