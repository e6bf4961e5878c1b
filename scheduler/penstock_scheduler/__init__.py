"""The brain: domain model, policies, solver, placement, the round loop and its ports, the daemon and the command line."""

__version__ = "0.1.0"
"""The only place of the version. The packages, the documentation and the SPANK plugin (`script/generate`) take it from here."""
