pytest_plugins = ["penstock_slurm.loopback.fixtures"]
