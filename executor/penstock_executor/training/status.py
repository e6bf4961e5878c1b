"""Exit statuses of the processes of a run."""

import signal

STOPPED = 128 + signal.SIGTERM
"""The run was asked to stop, has saved, and is not done."""

SUPERSEDED = 75
"""A later run of the job has begun."""

BEGIN_ANEW = 76
"""The run has saved and gives up nodes: its launchers begin the next one on the nodes that stay."""
