"""Submitting through real sbatch, as the user, with the key in the job's comment beside the job spec.

The user's environment and script go to a process that already runs as that user, so none of the user's code runs with the
daemon's rights. sbatch dies with the daemon (PR_SET_PDEATHSIG), so no submission arrives after the next daemon has searched for
it.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import pwd
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from penstock_profiles.wire import SPOOL_VARIABLE, claimed_epochs
from penstock_scheduler import open_files
from penstock_scheduler.errors import BadJobSpec, ClusterAway
from penstock_scheduler.leadership.lease import ALONE, boot_s
from penstock_scheduler.messages import OutputFiles, Submission
from penstock_scheduler.model import JobId
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.ports import Fate, Leadership, Unmanaged
from penstock_scheduler.spool import Spool
from penstock_slurm.endings import exceeded_memory
from penstock_slurm.gateway import CliGateway, JobGone, SlurmError, SlurmJob
from penstock_slurm.gateway.base import ENDED
from penstock_slurm.gateway.commands import OVER, guarded
from penstock_slurm.holds import ADMIN, HoldFiles, foreign_hold
from penstock_slurm.output_files import resolved
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.view import job_spec

log = logging.getLogger(__name__)

WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Before a command that must not outlive the process that starts it."""

KEY = "penstock_key"
"""Key in a comment's JSON object: the idempotency key."""

_FIELD = re.compile(
    r"(?:^| )(ExitCode|StdOut|StdErr|UserId|JobId|JobName|BatchHost|ArrayJobId|ArrayTaskId)="
    r"(.*?)(?=\s+[A-Z][A-Za-z/:]*=|\s*$)"
)
"""A field of `scontrol -o show job`. Users choose names and paths, which may look like other fields: nothing that protects one
user from another may depend on them."""


class SlurmSubmitter:
    """`ports.Submitter` on Slurm."""

    def __init__(
        self, gateway: CliGateway, spool: Spool, settings: SlurmSettings, leadership: Leadership = ALONE
    ) -> None:
        self._gateway, self._spool, self._settings, self._leadership = gateway, spool, settings, leadership
        self._holds = HoldFiles(spool.folder, leadership)

    def submit(self, order: Submission, user: str, uid: int) -> JobId:
        """See `ports.Submitter`: `sbatch --hold`, the script on its standard input."""
        if _is_array(order):
            raise BadJobSpec(
                "an array is several jobs, and a submission is one; submit each element as a job, or the array with sbatch"
            )
        account = pwd.getpwuid(uid)
        mine = os.geteuid()
        if mine not in (0, uid):
            raise BadJobSpec(
                f"penstockd runs as uid {mine} and can submit only for that user; run it as root, or use sbatch yourself"
            )
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": account.pw_dir,
            "USER": user,
            "LOGNAME": user,
            "SHELL": account.pw_shell or "/bin/sh",
            **order.environment,
            SPOOL_VARIABLE: str(self._spool.folder.absolute()),
        }
        conf = str(self._settings.conf) if self._settings.conf else os.environ.get("SLURM_CONF")
        if conf:
            environment["SLURM_CONF"] = conf
        become = {} if mine == uid else {"user": uid, "group": account.pw_gid, "extra_groups": _groups(user, account)}
        sbatch = [*WITH_PARENT, *open_files.as_found(), "sbatch", *_options(order, account.pw_dir)]
        with self._leadership.write("slurm", f"sbatch of {user}") as until_s:
            if not math.isinf(until_s):
                sbatch = [*WITH_PARENT, *guarded(sbatch, until_s)]
            timeout_s = min(self._settings.command_timeout_s, max(until_s - boot_s(), 0.1))
            return self._sbatch(sbatch, order, environment, become, timeout_s)

    def _sbatch(
        self,
        sbatch: Sequence[str],
        order: Submission,
        environment: dict[str, str],
        become: dict[str, Any],
        timeout_s: float,
    ) -> JobId:
        try:
            done = subprocess.run(
                sbatch,
                input=order.script if order.script is not None else _script(order.command or ()),
                env=environment,
                cwd="/",
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                check=False,
                **become,
            )
        except subprocess.TimeoutExpired:
            raise ClusterAway("sbatch did not answer in time; try again with the same key") from None
        except OSError as error:
            raise ClusterAway(f"sbatch cannot be started: {error}") from None
        if done.returncode in (OVER, 128 + signal.SIGKILL):
            raise ClusterAway("sbatch did not answer in time; try again with the same key")
        if done.returncode != 0:
            cause = done.stderr.strip().removeprefix("sbatch: error: ")
            if "Unable to contact slurm controller" in cause or "Socket timed out" in cause:
                raise ClusterAway(cause)
            raise BadJobSpec(cause or f"sbatch ended with status {done.returncode}")
        return str(done.stdout.strip().split(";")[0])

    def find(self, user: str, key: str) -> JobId | None:
        """See `ports.Submitter`. Slurm forgets jobs some minutes after their end (MinJobAge)."""
        for job in self._jobs():
            if job.user == user and _key(job.comment) == key:
                return job.id
        return None

    def cancel(self, job: JobId) -> None:
        """See `ports.Submitter`."""
        try:
            self._gateway.cancel(job)
        except JobGone:
            return
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def hold(self, job: JobId, by: str, *, admin: bool) -> None:
        """See `ports.Submitter`. The round loop holds it in Slurm if Slurm might start it."""
        self._holds.hold(job, by, admin=admin)

    def release(self, job: JobId, *, admin: bool) -> None:
        """See `ports.Submitter`. The round loop carries it out."""
        asked = self._holds.asked(job)
        record = next((each for each in self._jobs() if each.id == job), None)
        foreign = record is not None and foreign_hold(record, self._spool.control(job))
        if asked is None and not foreign:
            raise BadJobSpec(f"nobody holds job {job}; `penstock explain {job}` says what it waits for")
        by_admin = (asked is not None and asked.admin) or (foreign and record is not None and record.reason == ADMIN)
        if by_admin and not admin:
            raise BadJobSpec(f"an admin holds job {job}; ask an admin to release it")
        self._holds.release(job)

    def fates(self, jobs: Sequence[JobId]) -> dict[JobId, Fate | None]:
        """See `ports.Submitter`."""
        wanted = set(jobs)
        found: dict[JobId, Fate | None] = {}
        for job in self._jobs():
            if job.id in wanted:
                found[job.id] = self._fate(job) if job.state in ENDED else None
        return found | self._forgotten([job for job in jobs if job not in found])

    def _forgotten(self, jobs: Sequence[JobId]) -> dict[JobId, Fate | None]:
        """How jobs ended that slurmctld has forgotten (MinJobAge): what the accounting says, if there is one."""
        try:
            ends = self._gateway.ends(jobs) if jobs else {}
        except SlurmError as error:
            log.info("cannot read Slurm's accounts", extra={"jobs": len(jobs), "text": str(error)})
            return {}
        return {job: Fate(end.state, end.exit_code, end.end_s) for job, end in ends.items() if job in jobs}

    def _fate(self, job: SlurmJob) -> Fate:
        control = self._spool.control(job.id)
        text = exceeded_memory(job, control.memory_mb) if control is not None else ""
        return Fate(job.state, self._exit_code(job.id), job.end_s, text)

    def unmanaged(self, job: JobId) -> Unmanaged | None:
        """See `ports.Submitter`: one call of squeue."""
        try:
            records = self._gateway.records(job)
        except SlurmError as error:
            raise ClusterAway(str(error)) from error
        if not records:
            return None
        record = next((each for each in records if each.id == job), None)
        if record is not None:
            return self._own_record(record)
        (first, *_), user = records, records[0].user
        if job == str(first.array_job_id):
            text = f"is an array: ask for its elements, such as {first.id}; `scancel {job}` cancels them all"
        else:
            text = f"is element {first.array_task_id} of array {first.array_job_id}: ask for {first.id}"
        return Unmanaged(user, text)

    def _own_record(self, record: SlurmJob) -> Unmanaged:
        """What a job is that the round loop has not shown."""
        try:
            has_spec = job_spec(record) is not None
        except BadJobSpec:
            has_spec = True
        shows = f"`scontrol show job {record.id}` shows it"
        if not has_spec and record.state in ENDED:
            text = f"has ended ({record.state}) and was not managed by Penstock"
        elif not has_spec:
            text = f"has no job spec, so it is a plain job, which Penstock leaves to Slurm; {shows}"
        elif not {*record.partition} & {*self._settings.partitions, self._settings.cloud_partition}:
            text = f"is in partition {','.join(record.partition)}, which Penstock does not manage; {shows}"
        elif record.state in ENDED:
            text = f"ended ({record.state}) before Penstock had looked at it; {shows}"
        else:
            return Unmanaged(record.user, "has a job spec, and penstockd has not looked at it yet", later=True)
        return Unmanaged(record.user, text)

    def output(self, job: JobId, user: str) -> OutputFiles | None:
        """See `ports.Submitter`: one call of scontrol."""
        told = self._told(job)
        if not told.get("StdOut", "").startswith("/"):
            return None
        try:
            uid = pwd.getpwnam(user).pw_uid
        except KeyError:
            log.warning("output unknown", extra={"job": job, "text": f"this host knows no user {user}"})
            return None
        stdout, stderr = (resolved(told.get(name, ""), told) for name in ("StdOut", "StdErr"))
        return OutputFiles(stdout=stdout, stderr=stderr or stdout, uid=uid)

    def epoch(self, job: JobId) -> int | None:
        """See `ports.Submitter`: the epoch from the daemon, or that of a run that Slurm has restarted by itself since."""
        control = self._spool.control(job)
        return max([control.epoch if control else 0, *claimed_epochs(self._spool.folder, job)]) or None

    def _jobs(self) -> tuple[SlurmJob, ...]:
        try:
            return self._gateway.jobs(finished=True)
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def _exit_code(self, job: JobId) -> int | None:
        code, _, number = self._told(job).get("ExitCode", "").partition(":")
        if not code.isdigit():
            return None
        return int(code) or (128 + int(number) if number.isdigit() and int(number) else 0)

    def _told(self, job: JobId) -> dict[str, str]:
        return dict(self._fields(job))

    def _fields(self, job: JobId) -> list[tuple[str, str]]:
        try:
            return _FIELD.findall(self._gateway.describe(job))
        except JobGone:
            return []
        except SlurmError as error:
            raise ClusterAway(str(error)) from error


def _options(order: Submission, home: str) -> list[str]:
    comment = {SPEC_KEY: order.spec.model_dump(mode="json", exclude_unset=True)}
    if order.key is not None:
        comment[KEY] = order.key  # type: ignore[assignment]
    words = ["--parsable", "--hold", "--requeue", "--gres=gpu:1", f"--comment={json.dumps(comment)}"]
    words.append(f"--chdir={order.working_directory or home}")
    named = {
        "job-name": order.name,
        "partition": order.partition,
        "account": order.account,
        "qos": order.qos,
        "cpus-per-task": order.cpus_per_task,
        "mem": f"{order.memory_mb}M" if order.memory_mb else None,
        "output": order.output,
        "dependency": order.dependency,
        "deadline": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(order.deadline_s)) if order.deadline_s else None,
        "container-image": order.container_image,
        "time": str(math.ceil(order.time_limit_s / 60)) if order.time_limit_s else None,
    }
    return [*words, *(f"--{name}={value}" for name, value in named.items() if value is not None)]


def _is_array(order: Submission) -> bool:
    """Whether sbatch would submit an array, by the environment or by #SBATCH lines before the script's first command."""
    if "SBATCH_ARRAY_INX" in order.environment:
        return True
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), (order.script or "").splitlines())
    return any(word.startswith(("-a", "--ar")) for line in head if line.startswith("#SBATCH") for word in line.split())


def _script(command: Sequence[str]) -> str:
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


def _groups(user: str, account: pwd.struct_passwd) -> list[int]:
    return os.getgrouplist(user, account.pw_gid)


def _key(comment: str) -> str | None:
    try:
        document = json.loads(comment)
    except ValueError:
        return None
    found = document.get(KEY) if isinstance(document, dict) else None
    return found if isinstance(found, str) else None
