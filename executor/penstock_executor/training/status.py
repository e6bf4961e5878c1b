"""Exit statuses of the processes of a run."""

import signal

STOPPED = 128 + signal.SIGTERM
"""The run was asked to stop, has saved, and is not done."""

SUPERSEDED = 75
"""A later run of the job has begun."""
