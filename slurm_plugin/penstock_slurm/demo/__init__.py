"""`penstock demo`: the same twelve jobs under Penstock and under plain Slurm, side by side, and a page to look at."""
