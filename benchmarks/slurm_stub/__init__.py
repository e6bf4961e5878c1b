"""A stand-in for Slurm's commands with thousands of nodes and jobs, and a library that makes a folder slow."""
