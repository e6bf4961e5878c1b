from hypothesis import settings

pytest_plugins = ["penstock_slurm.loopback.fixtures"]

settings.register_profile("penstock", deadline=None)  # no test is timed: machines are noisy
settings.load_profile("penstock")
