"""One job's life in Slurm: its states, its notes in Slurm, its holds, its times, its output."""
