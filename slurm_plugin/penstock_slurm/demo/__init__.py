"""`penstock demo`: runs the same twelve jobs under Penstock and under plain Slurm, and writes a report that compares them."""
