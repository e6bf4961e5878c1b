"""Callbacks for other training loops: the `Trainer` of Hugging Face, and PyTorch Lightning.

The loop keeps its own data loader, batch size, learning rate and checkpoints. Penstock adds reports, checkpoints on
request and a clean stop. Such jobs are rigid or strong-scaling; only `penstock_executor.start` adapts the batch and
uses each sample once.
"""
