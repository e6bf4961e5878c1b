"""For training loops that are somebody else's: the Hugging Face `Trainer`, PyTorch Lightning.

Their loader, batch size, learning rate and checkpoints stay their own: what Penstock adds is reports, checkpoints on request and
a clean stop. So such jobs are rigid or strong-scaling; only `penstock_executor.start` adapts the batch and keeps samples exact.
"""
