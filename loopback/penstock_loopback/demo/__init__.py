"""`penstock demo`: runs the same jobs under Penstock and under plain Slurm, and writes a report that compares them."""
