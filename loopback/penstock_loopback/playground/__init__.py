"""`penstock playground`: a loopback Slurm under Penstock, with its web page, that stays up and is never short of jobs."""
