"""Attaching Penstock to a Slurm and taking it off again: what `penstock slurm` does."""
