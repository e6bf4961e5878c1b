"""Errors, one class for each thing that a caller does differently."""


class PenstockError(Exception):
    """Base of all our errors: the message says what, where, and the remedy."""

    exit_status = 1
    """Of the command line that ends with it; see docs/user/cli.md."""


class ConfigError(PenstockError):
    """The settings, or the words of a command, are wrong: tell the admin and do not start."""


class BadJobSpec(PenstockError):
    """A job asks for something that cannot be: tell its user and leave the job alone."""


class RoundFailed(PenstockError):
    """This round could not be decided or observed: change nothing, say so, try again next round."""


class ClusterAway(RoundFailed):
    """The cluster's controller does not answer."""


class StoreError(RoundFailed):
    """The store could not be read or written."""
