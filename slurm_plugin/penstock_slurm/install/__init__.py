"""Installs Penstock's parts into a Slurm, checks and removes them: the command `penstock slurm`."""
