#!/usr/bin/env python3
"""A small transformer learns to count, with the Trainer of Hugging Face: reports, checkpoints on request, clean stops.

    pip install transformers accelerate
    python train.py

Penstock needs only the lines marked [1] to [3]. Nothing is downloaded.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from penstock_executor.integrations.huggingface import PenstockCallback, latest_checkpoint  # [1]


class Counting(torch.utils.data.Dataset):
    """Sequences a, a + b, a + 2 b, … modulo 64."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = (index // 63 + torch.arange(32) * (1 + index % 63)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="checkpoints-transformer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        save_steps=100,
        save_total_limit=2,
        logging_steps=50,
        report_to=[],
        dataloader_num_workers=options.workers,
    )
    callback = PenstockCallback(report_every_s=5)
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Counting(), callbacks=[callback])  # [2]
    trainer.train(resume_from_checkpoint=latest_checkpoint(options.output))  # [3]


if __name__ == "__main__":
    main()
