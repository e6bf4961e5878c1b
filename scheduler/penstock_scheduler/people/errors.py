"""Errors: one class for each way in which a caller reacts."""


class PenstockError(Exception):
    """Base of Penstock's errors. The message says what is wrong, where, and what to do."""

    exit_status = 1
    """Exit status of a command that fails with this error. See docs/user/cli.md."""


class ConfigError(PenstockError):
    """The settings or the arguments of a command are wrong. The program tells its user and does not start."""


class BadJobSpec(PenstockError):
    """A job spec asks for something impossible. The daemon tells the job's user and does not manage the job."""


class RoundFailed(PenstockError):
    """A round could not be observed or decided. The daemon changes nothing and tries again in the next round."""


class ClusterAway(RoundFailed):
    """The cluster's controller does not answer."""


class StoreError(RoundFailed):
    """The store cannot be read or written."""


class NoStandby(PenstockError):
    """No other penstockd can take the lead."""


class NoSuchKind(PenstockError):
    """No ended job is of this kind."""


class NoSuchRun(PenstockError):
    """There is no such run in the cloud."""


class CloudRefuses(PenstockError):
    """A provider does not do what an admin asks for."""


class NotLeading(StoreError):
    """This penstockd does not lead, or cannot show that it still does. Nothing was written, and nothing may be."""
