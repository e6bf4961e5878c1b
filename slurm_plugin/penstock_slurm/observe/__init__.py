"""From what Slurm and the spool say to what the scheduler sees."""
