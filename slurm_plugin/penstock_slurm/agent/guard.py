"""Thaws the jobs that an agent has frozen when the agent ends without doing so, or hangs. A program of its own, which outlives
the agent: `GuardedFreezer` starts it.

    python -I -S guard.py SECONDS

The agent writes a line to its standard input before it freezes anything, and in each tick: all that is frozen then. A file of a
cgroup stands for the processes in it; `PID:BEGAN` is a process that a signal has stopped, with its start time, so that a later
process with its number is left alone. At the end of the input, or after SECONDS without a line, the guard thaws what the newest
line names.

It imports nothing of Penstock, so that it needs little memory and starts at once.
"""

import os
import select
import signal
import sys
from pathlib import Path

MOST = 1 << 20
"""Bytes read at once: a pipe holds no more."""


def main(patience_s: float) -> None:
    """Guard until the input ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # those who stop a service signal all of its processes, and this one ends last
    rest, frozen, ends = b"", b"", False
    while not ends:
        ready = select.select([0], [], [], patience_s if frozen else None)[0]
        if ready:
            data = os.read(0, MOST)
            *lines, rest = (rest + data).split(b"\n")
            frozen, ends = lines[-1] if lines else frozen, not data
        if frozen and (ends or not ready):
            why = "has ended" if ends else f"has not answered for {patience_s:g} s"
            sys.stderr.write(f'level=warning event="frozen jobs are thawed" text="the agent {why}"\n')
            sys.stderr.flush()
            for target in frozen.decode("ascii").split():
                thaw(target)
            frozen = b""


def thaw(target: str) -> None:
    """Thaw a cgroup, or a process. One that is gone needs nothing; another failure must not keep the others frozen."""
    try:
        if target.startswith("/"):
            Path(target).write_text("THAWED" if target.endswith("/freezer.state") else "0", encoding="ascii")
        elif began(pid := int(target.partition(":")[0])) == target.partition(":")[2]:
            os.kill(pid, signal.SIGCONT)
    except (FileNotFoundError, ProcessLookupError):
        pass
    except OSError as error:
        sys.stderr.write(f'level=error event="not thawed" text="{target}: {error.strerror}"\n')


def began(pid: int) -> str:
    """Start time of a process, as the kernel counts it; "": there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


if __name__ == "__main__":
    main(float(sys.argv[1]))
