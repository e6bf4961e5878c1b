"""The brain: domain model, policies, solver, placement, the round loop and its ports, the daemon and the command line."""

__version__ = "0.1.0"
