"""Jobs that share the GPUs of a node: orders to the agents, and the reservation of the GPUs in Slurm."""
