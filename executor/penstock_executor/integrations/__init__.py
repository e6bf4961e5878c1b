"""Callbacks for other training loops: the `Trainer` of Hugging Face, and PyTorch Lightning.

The loop keeps its own checkpoints and schedule. Penstock adds reports, checkpoints on request and a clean stop. With an
adaptive batch (`adaptive`), Penstock also gives the loop its data loader, and scales the learning rate.
"""
