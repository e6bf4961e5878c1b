"""`penstock submit`: sbatch with presets, with a dry run, and with the adaptive flags where their plugin is not installed."""
