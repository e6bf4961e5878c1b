"""From an action of the scheduler to commands of Slurm, and submissions."""
