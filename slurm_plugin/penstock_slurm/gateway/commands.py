"""Runs Slurm's commands: their environment, their time limit, retries, and jobs that slurmdbd has not registered."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_scheduler.safety import children
from penstock_scheduler.safety.children import Account
from penstock_scheduler.store.leadership.lease import ALONE, boot_s
from penstock_slurm.gateway.errors import (
    CommandsMissing,
    ControllerAway,
    JobGone,
    Messages,
    TimedOut,
    Transient,
    UnreadableAnswer,
    Unregistered,
)

if TYPE_CHECKING:  # the agent loads no more than it needs
    from penstock_scheduler.api.ports import Leadership

log = logging.getLogger(__name__)

COMMANDS = ("scontrol", "squeue", "scancel")
"""The commands that must be on PATH."""

KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Slurm's variables that name the cluster and the user. All others change what commands print or do."""

OF_ANYBODY = frozenset({"PATH", "LC_ALL", "SLURM_CONF", "SLURM_CONF_SERVER"})
"""Variables of commands that run as another account, which can read them: a daemon's may have passwords and its Slurm token."""

RETRIES = 4
RETRY_PAUSE_S = 0.2
"""From 24.11 on, slurmctld without slurmdbd answers an update that names a partition with `Resource temporarily unavailable`
if the thread that happens to serve it has that error left over (`_update_job`: error_code = errno). 1 of 540 updates failed on
24.11.5, and on 26.05.5 with a busy machine two in a row."""

JOB_ID = re.compile(r"\d+(_\d+)?")

UPDATES = frozenset({"update", "uhold", "release"})
"""scontrol's commands that Slurm does not carry out for a job that slurmdbd has not registered."""

UNREGISTERED = re.compile(r"the DB index is being set.* for job (\S+)$", re.MULTILINE)
"""scontrol's message about such a job, with its id."""

UNREGISTERED_S = 60.0
"""Pause before another update of such a job: each one takes 5 s of the command's time limit."""


FENCING_VARIABLE = "PENSTOCK_FENCING"
"""Environment variable of commands that change something: the fencing number of the penstockd that runs them."""

OVER = 75
"""Exit status of `GUARD` if the time of a command is over before it begins."""

GUARD = (
    *("/bin/sh", "-c"),
    f'read up rest <"$1"; left=$(($2 - ${{up%.*}})); [ $left -gt 0 ] || exit {OVER}; shift 2; '
    'program=$1; shift; exec "$program" --foreground -s KILL $left "$@"',
    "penstock-write",
)
"""Runs a command (after its last argument: a file with the machine's uptime, an uptime in seconds, the path of timeout(1), and
the command) until that time, whatever becomes of this process: one that is frozen between its check and the start of the command
starts nothing when it wakes up."""

UPTIME = Path("/proc/uptime")


def guarded(argv: Sequence[str], until_s: float, uptime: Path = UPTIME) -> tuple[str, ...]:
    """A command that begins and ends before `until_s`, by `boot_s`, or exits with `OVER`, or 137 if it was ended.

    In a container, the file may tell the container's uptime. It is read first: a freeze before `boot_s` makes the time shorter.
    """
    if math.isinf(until_s):
        return (*argv,)
    up_s = float(uptime.read_text(encoding="ascii").split()[0])
    return *GUARD, str(uptime), str(math.floor(until_s - (boot_s() - up_s))), _timeout(), *argv


@cache
def _timeout() -> str:
    return children.program("timeout")


GUARD_S = 5.0
"""How much later than the guard this process gives a command up."""

MOST_BYTES = 2**30
"""Most output of a command of Slurm: squeue prints 80 MB for 60,000 jobs with long comments."""


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a failed command, or its exit status."""
    return done.stderr.strip() or done.stdout.strip() or f"ended with status {done.returncode}, without a message"


class SlurmCommandRunner:
    """Runs Slurm's commands for the Slurm of `conf`. None: that of SLURM_CONF or the default.

    Raises:
        CommandsMissing: commands are not on PATH.
    """

    def __init__(
        self, conf: Path | None, timeout_s: float, leadership: Leadership = ALONE, messages: Messages | None = None
    ) -> None:
        self.messages = Messages() if messages is None else messages
        self._programs: dict[str, str] = {}
        """Command -> its absolute path, by this process's PATH when it was first needed: no variable changes it later."""
        missing = [command for command in COMMANDS if self._program(command) is None]
        if missing:
            raise CommandsMissing(
                f"not on PATH ({os.environ.get('PATH', '')}); install Slurm's commands (Debian: slurm-client) or add "
                "their folder to PATH",
                command=", ".join(missing),
            )
        self.timeout_s = timeout_s
        self._leadership = leadership
        self.environment = command_environment(os.environ, conf)
        self._unregistered: dict[str, float] = {}
        """Jobs that slurmdbd has not registered -> when Slurm last said so."""

    def read(self, *argv: str, variables: Mapping[str, str] | None = None) -> str:
        """The output of a command that changes nothing."""
        done = self.run(argv, variables or {})
        if done.returncode != 0 or "error:" in done.stderr:
            otherwise = ControllerAway if done.returncode else UnreadableAnswer  # 0: for example an unknown field
            raise self.messages.error(failure(done), command=argv[0], otherwise=otherwise)
        return done.stdout

    def change_nodes(self, *argv: str) -> None:
        """Run a command that changes nodes, without repetitions."""
        done = self.run(argv, {}, writes=" ".join(argv))
        if done.returncode != 0 or "error:" in done.stderr:
            otherwise = ControllerAway if done.returncode else UnreadableAnswer
            raise self.messages.error(failure(done), command=argv[0], otherwise=otherwise)

    def change(self, job_id: str, *argv: str, account: Account | None = None) -> None:
        """Run a command that changes a job. Repeats it up to `RETRIES` times if Slurm could not do it at the moment.

        Args:
            account: whom it runs as; None: this process's user.
        """
        expect_id(job_id)
        self._retry(lambda: self.change_once(job_id, *argv, account=account))

    def change_once(self, job_id: str, *argv: str, account: Account | None = None) -> None:
        """Run a command that changes a job, without repetitions."""
        expect_id(job_id)
        if (waits := self.unregistered(job_id, argv[1:])) is not None:
            raise waits
        done = self.run(argv, {}, job_id, writes=" ".join(argv)[:200], account=account)
        # scancel of an unknown job, and scontrol update with a bad number, print an error and return 0
        if done.returncode != 0 or "error:" in done.stderr:
            raise self.messages.error(failure(done), command=" ".join(argv[:2]), job_id=job_id)
        self.forget(job_id)

    def unregistered(self, job_id: str, arguments: Sequence[str]) -> Unregistered | None:
        """The error of a scontrol command about a job that slurmdbd had not registered a moment ago; None to run the command."""
        seen_s = self._unregistered.get(job_id)
        if arguments[0] not in UPDATES or seen_s is None or time.monotonic() - seen_s >= UNREGISTERED_S:
            return None
        return Unregistered("the DB index is being set", command=f"scontrol {arguments[0]}", job_id=job_id)

    def was_unregistered(self, job_id: str) -> bool:
        """Whether the last update of the job failed because slurmdbd had not registered it."""
        return job_id in self._unregistered

    def forget(self, job_id: str) -> None:
        """Note that Slurm has changed the job."""
        self._unregistered.pop(job_id, None)

    def order(self, job_id: str) -> float:
        """A sort key. Jobs that may use up the time of others come last, those that have waited longest first among them."""
        return self._unregistered.get(job_id, 0.0)

    def _retry(self, change: Callable[[], None]) -> None:
        for left in range(RETRIES, -1, -1):
            try:
                change()
                return
            except Transient as error:
                if left == 0 or not error.at_once:
                    raise
                log.info("asking Slurm again", extra={"job": error.job_id, "text": error.text})
                time.sleep(RETRY_PAUSE_S)

    def run(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        job_id: str = "",
        text: str = "",
        writes: str = "",
        account: Account | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with `text` as its input.

        Args:
            writes: what it changes, for the log; empty: it changes nothing.
            account: whom it runs as; None: this process's user.

        Raises:
            TimedOut: it did not end in time.
            Transient: it could not be started.
            NotLeading: it would change something, and this penstockd does not lead.
        """
        about, program = " ".join(argv[:2]), self._program(argv[0])
        if program is None:
            raise Transient("is not on PATH; install Slurm's commands", command=argv[0], job_id=job_id)
        argv = (program, *argv[1:])
        if not writes:
            return self._run(argv, variables, job_id, text, self.timeout_s, about)
        with self._leadership.write("slurm", writes) as until_s:
            if not self._leadership.fenced:
                return self._run(argv, variables, job_id, text, self.timeout_s, about, account)
            begun_s = boot_s()
            until_s = min(until_s, begun_s + self.timeout_s)
            # The guard ends the command, so that the command never outlives the guard.
            numbered = {**variables, FENCING_VARIABLE: str(self._leadership.number)}
            limit_s = max(until_s - begun_s, 0) + GUARD_S
            done = self._run(guarded(argv, until_s), numbered, job_id, text, limit_s, about, account)
        if done.returncode in (OVER, 128 + signal.SIGKILL):
            self._leadership.expect("slurm")
            late = TimedOut(f"no answer in {until_s - begun_s:.0f} s", command=about, job_id=job_id)
            late.output = done.stderr
            raise late
        return done

    def _run(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        job_id: str,
        text: str,
        timeout_s: float,
        about: str,
        account: Account | None = None,
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment
        if account is not None and account.uid != os.geteuid():
            environment = {name: value for name, value in environment.items() if name in OF_ANYBODY}
        try:
            done = children.run(
                argv,
                env={**environment, **variables},
                input=text.encode(errors="replace"),
                timeout_s=timeout_s,
                most_bytes=MOST_BYTES,
                account=account,
            )
        except children.TookTooLong as error:
            late = TimedOut(f"no answer in {timeout_s:g} s", command=about, job_id=job_id)
            late.output = error.stderr.decode(errors="replace")
            self._note(late.output)
            raise late from None
        except children.TooMuchOutput as error:
            raise UnreadableAnswer(str(error), command=about, job_id=job_id) from error
        except children.ChildError as error:
            raise Transient(str(error), command=about, job_id=job_id) from error
        self._note(done.err)
        return subprocess.CompletedProcess(argv, done.returncode, done.out, done.err)

    def _program(self, command: str) -> str | None:
        """The absolute path of a command; None: it is not on PATH."""
        if command not in self._programs and (found := children.found(command)) is not None:
            self._programs[command] = found
        return self._programs.get(command)

    def _note(self, output: str) -> None:
        """Remember which jobs slurmdbd has not registered."""
        self._unregistered |= dict.fromkeys(UNREGISTERED.findall(output), time.monotonic())


def no_job(job_id: str) -> JobGone:
    """The error for text that cannot be a job's id."""
    return JobGone("no job has such an id: expected 12 or, for an array's element, 12_3", command="", job_id=job_id)


def expect_id(job_id: str) -> None:
    """Raise JobGone if the text cannot be a job's id."""
    if JOB_ID.fullmatch(job_id) is None:
        raise no_job(job_id)


def command_environment(ours: Mapping[str, str], conf: Path | None) -> dict[str, str]:
    """This process's environment in the C locale, without variables that change the commands' output."""
    environment = {
        key: value
        for key, value in ours.items()
        if key in KEPT or not key.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_"))
    }
    environment["LC_ALL"] = "C"
    if conf is not None:
        environment["SLURM_CONF"] = str(conf)
    return environment
