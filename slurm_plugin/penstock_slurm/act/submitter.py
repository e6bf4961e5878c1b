"""Submitting through real sbatch, as the user, with the key in the job's comment beside the job spec.

The user chooses no program and no variable of any process outside the job: sbatch runs as the user, by its absolute path, and
gets the job's variables through `--export-file`, the script on its standard input. sbatch's answer is believed only once Slurm
shows that job, of that user, with the key of this submission: a user may trace a process that runs as that user. sbatch dies with
the daemon (PR_SET_PDEATHSIG), so no submission arrives after the next daemon has searched for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import pwd
import re
import resource
import secrets
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence

from penstock_profiles.wire import SPOOL_VARIABLE, claimed_epochs
from penstock_scheduler.api.messages import OutputFiles, Submission
from penstock_scheduler.api.ports import Fate, Leadership, Owned, Unmanaged
from penstock_scheduler.model import JobId
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.people.errors import BadJobSpec, ClusterAway
from penstock_scheduler.safety import children, open_files
from penstock_scheduler.safety.children import Account
from penstock_scheduler.store.leadership.lease import ALONE, boot_s
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import CliGateway, JobGone, Refused, SlurmError, SlurmJob
from penstock_slurm.gateway.base import ADMIN, ENDED, slurm_time
from penstock_slurm.gateway.commands import OVER, guarded
from penstock_slurm.jobs.holds import HoldFiles, foreign_hold, held_by_admin
from penstock_slurm.jobs.output_files import exceeded_memory, resolved
from penstock_slurm.observe.sorting import job_spec
from penstock_slurm.settings import SlurmSettings

log = logging.getLogger(__name__)

WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Before a command that must not outlive the process that starts it."""

KEY = "penstock_key"
"""Key in a comment's JSON object: the idempotency key, or a random one that tells this submission from others."""

MOST_BYTES = 2**20
"""Most that sbatch may print: a job's id, warnings, and what the site's plugins tell the user."""

_NUMBER = re.compile(r"[1-9][0-9]{0,9}")

_EXIT_CODE = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")
"""Status and signal. Arguments of the user's may look like this field, so it can hold any text."""

_FIELD = re.compile(
    r"(?:^| )(ExitCode|StdOut|StdErr|UserId|JobId|JobName|BatchHost|ArrayJobId|ArrayTaskId)="
    r"(.*?)(?<!\s)(?=\s+[A-Z][A-Za-z/:]*=|\s*$)"
)
"""A field of `scontrol -o show job`. Users choose names and paths, which may look like other fields: nothing that protects one
user from another may depend on them. A value ends in no space: else a search through 100,000 spaces, which the arguments of a
script may have, would take minutes."""

TAKEN_OUT = Fate("CANCELLED", None, None, text="was cancelled before it ran; Slurm keeps no record of such an element")
"""The end of an array's element that never ran, while Slurm still lists others of the array."""


class SlurmSubmitter:
    """`ports.Submitter` on Slurm."""

    def __init__(
        self, gateway: CliGateway, spool: Spool, settings: SlurmSettings, leadership: Leadership = ALONE
    ) -> None:
        self._gateway, self._spool, self._settings, self._leadership = gateway, spool, settings, leadership
        self._holds = HoldFiles(spool.folder, leadership)
        # Looked for once, so that they stay what they were when penstockd started.
        names = ("sbatch", "setpriv", "prlimit")
        self._programs = {name: found for name in names if (found := children.found(name)) is not None}

    def submit(self, order: Submission, user: str, uid: int) -> JobId:
        """See `ports.Submitter`: `sbatch --hold`, the script on its standard input."""
        if _is_array(order):
            raise BadJobSpec(
                "an array is several jobs, and a submission is one; submit each element as a job, or the array with sbatch"
            )
        if any(word.startswith("-W") or word == "--wait" for word in _words_of_script(order)):
            raise BadJobSpec(
                "with --wait, sbatch would answer only when the job has ended; leave it out of the script, and ask for the job "
                "by GET with the parameters wait and since"
            )
        if options := sorted(name for name in order.environment if name.startswith("SBATCH_")):
            raise BadJobSpec(
                f"environment has {', '.join(options)}: sbatch takes such variables for options, and `environment` is the job's "
                "alone; use the other fields of the submission, or #SBATCH lines in the script"
            )
        account = children.account_of(uid)
        mine = os.geteuid()
        if mine not in (0, uid):
            raise BadJobSpec(
                f"penstockd runs as uid {mine} and can submit only for that user; run it as root, or use sbatch yourself"
            )
        site = self._variables_of_the_site()
        key = order.key if order.key is not None else f"-{secrets.token_hex(16)}"
        with (
            self._leadership.write("slurm", f"sbatch of {user}") as until_s,
            _exported(_variables(order, account) | _variables_of_sbatch(order) | site) as fd,
        ):
            # Without --export=ALL, 26.05 leaves out what the file has, too.
            sbatch = ("sbatch", f"--export-file={fd}", "--export=ALL", *_options(order, key, account.home))
            argv = guarded([*self._words(open_files.as_found()), *self._words(sbatch)], until_s)
            argv = (*self._words(WITH_PARENT), *argv)
            timeout_s = min(self._settings.command_timeout_s, max(until_s - boot_s(), 0.1))
            job = self._sbatch(argv, order, account, site, fd, timeout_s)
        try:
            self._expect_own(job, account, key)
        except ClusterAway as error:
            if order.key is not None:
                raise  # the same key finds the job
            text = f"sbatch told of job {job}, but Slurm does not show it now ({error}); see `squeue --me`"
            raise BadJobSpec(f"{text} before you submit again") from None
        return job

    def _words(self, words: Sequence[str]) -> Sequence[str]:
        """A command with its program's absolute path. Raises ClusterAway."""
        if not words:
            return ()
        if words[0] not in self._programs:
            raise ClusterAway(
                f"{words[0]} was not on PATH when penstockd started; install it and start penstockd again"
            )
        return (self._programs[words[0]], *words[1:])

    def _variables_of_the_site(self) -> dict[str, str]:
        """All variables of sbatch, which become the job's too, and about which the site's word is the last."""
        found = {SPOOL_VARIABLE: str(self._spool.folder.absolute())}
        conf = str(self._settings.conf) if self._settings.conf else os.environ.get("SLURM_CONF")
        return found | ({"SLURM_CONF": conf} if conf else {})

    def _sbatch(
        self,
        argv: Sequence[str],
        order: Submission,
        account: Account,
        environment: Mapping[str, str],
        fd: int,
        timeout_s: float,
    ) -> JobId:
        script = order.script if order.script is not None else _script(order.command or ())
        try:
            done = children.run(
                argv,
                env=environment,
                input=script.encode(errors="replace"),
                timeout_s=timeout_s,
                most_bytes=MOST_BYTES,
                account=account,
                pass_fds=[fd],
            )
        except children.TookTooLong:
            raise ClusterAway("sbatch did not answer in time; try again with the same key") from None
        except children.ChildError as error:
            raise ClusterAway(f"sbatch {error.text}") from None
        if done.returncode in (OVER, 128 + signal.SIGKILL):
            raise ClusterAway("sbatch did not answer in time; try again with the same key")
        if done.returncode != 0:
            cause = done.err.strip().removeprefix("sbatch: error: ")
            if "Unable to contact slurm controller" in cause or "Socket timed out" in cause:
                raise ClusterAway(cause)
            raise BadJobSpec(cause or f"sbatch ended with status {done.returncode}")
        told = done.out.strip().split(";")[0]
        if _NUMBER.fullmatch(told) is None:
            raise BadJobSpec(f"sbatch printed {told[:100]!r} instead of the job's id; the job may be there: see squeue")
        return told

    def _expect_own(self, job: JobId, account: Account, key: str) -> None:
        """Raise BadJobSpec unless Slurm shows this job as this user's, with the key of its submission."""
        record = self._record(job)
        if record is None or record.uid != account.uid or _key(record.comment) != key:
            log.warning("a submission's job is not the user's", extra={"job": job, "user": account.name})
            raise BadJobSpec(
                f"sbatch told of job {job}, but Slurm shows no such job of {account.name}'s with the key of this submission, so "
                "Penstock does not take it for this user's; see `squeue --me` and submit again"
            )

    def _record(self, job: JobId) -> SlurmJob | None:
        """A job as Slurm shows it now; None: it shows none of exactly this id. Raises ClusterAway."""
        try:
            return next((each for each in self._gateway.records(job) if each.id == job), None)
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def owned(self, job: JobId) -> Owned | None:
        """See `ports.Submitter`: one call of squeue."""
        record = self._record(job)
        return None if record is None else Owned(record.user, record.uid, record.restarts, record.submit_s)

    def find(self, user: str, key: str) -> JobId | None:
        """See `ports.Submitter`. Slurm forgets jobs some minutes after their end (MinJobAge)."""
        try:
            jobs = self._gateway.jobs_of(user)
        except SlurmError as error:
            raise ClusterAway(str(error)) from error
        return next((job.id for job in jobs if job.user == user and _key(job.comment) == key), None)

    def cancel(self, job: JobId, user: str | None) -> None:
        """See `ports.Submitter`. penstockd that is not root asks Slurm whose job it is, and cancels with its own right."""
        account = None
        if user is not None:
            try:
                account = children.account_of(user)
            except KeyError:
                raise BadJobSpec(f"this host knows no user {user}, so that nothing can be done as this user") from None
            if os.geteuid() not in (0, account.uid):
                found = self.owned(job)
                if found is None:
                    return
                if found.uid != account.uid:
                    raise BadJobSpec(f"job {job} is not a job of {user}")
                account = None
        try:
            self._gateway.cancel(job, account)
        except JobGone:
            return
        except Refused as error:
            raise BadJobSpec(str(error)) from error
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def hold(self, job: JobId, by: str, *, admin: bool) -> None:
        """See `ports.Submitter`. The round loop holds it in Slurm if Slurm might start it."""
        self._holds.hold(job, by, admin=admin)

    def release(self, job: JobId, *, admin: bool) -> None:
        """See `ports.Submitter`. The round loop carries it out."""
        asked = self._holds.asked(job)
        record = self._record(job)
        foreign = record is not None and foreign_hold(record, self._spool.control(job))
        if asked is None and not foreign:
            raise BadJobSpec(f"nobody holds job {job}; `penstock explain {job}` says what it waits for")
        by_admin = self._holds.by_admin(job) or (record is not None and record.reason == ADMIN)  # also while it runs
        if by_admin and not admin:
            raise BadJobSpec(held_by_admin(job))
        self._holds.release(job, admin=admin)

    def fates(self, jobs: Sequence[JobId]) -> dict[JobId, Fate | None]:
        """See `ports.Submitter`."""
        wanted = set(jobs)
        found: dict[JobId, Fate | None] = {}
        arrays: set[str] = set()
        for job in self._jobs():
            if job.id in wanted:
                found[job.id] = self._fate(job) if job.state in ENDED else None
            elif job.array_job_id is not None:
                arrays.add(str(job.array_job_id))
        found |= self._forgotten([job for job in jobs if job not in found])
        return found | {
            job: TAKEN_OUT for job in jobs if job not in found and job.partition("_")[0] in arrays and self._unsent(job)
        }

    def _unsent(self, job: JobId) -> bool:
        """Whether Penstock has never sent a job to nodes."""
        control = self._spool.control(job)
        return control is None or control.nodes is None

    def _forgotten(self, jobs: Sequence[JobId]) -> dict[JobId, Fate | None]:
        """How jobs ended that slurmctld has forgotten (MinJobAge): what the accounting says, if there is one."""
        try:
            ends = self._gateway.ends(jobs) if jobs else {}
        except SlurmError as error:
            log.info("cannot read Slurm's accounts", extra={"jobs": len(jobs), "text": str(error)})
            return {}
        return {
            job: Fate(end.state, end.exit_code, end.end_s, submit_s=end.submit_s)
            for job, end in ends.items()
            if job in jobs
        }

    def _fate(self, job: SlurmJob) -> Fate:
        control = self._spool.control(job.id)
        text = exceeded_memory(job, control.memory_mb) if control is not None else ""
        # Slurm shows the end of a job that never ran as its start, too.
        return Fate(job.state, self._exit_code(job.id), job.end_s, job.start_s if job.nodes else None, text)

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
        return OutputFiles(stdout=stdout, stderr=stderr or stdout, uid=uid) if stdout else None

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
        found = _EXIT_CODE.fullmatch(self._told(job).get("ExitCode", ""))
        if found is None:
            return None
        code, number = map(int, found.groups())
        return code or (128 + number if number else 0)

    def _told(self, job: JobId) -> dict[str, str]:
        return dict(self._fields(job))

    def _fields(self, job: JobId) -> list[tuple[str, str]]:
        try:
            return _FIELD.findall(self._gateway.describe(job))
        except JobGone:
            return []
        except SlurmError as error:
            raise ClusterAway(str(error)) from error


def _options(order: Submission, key: str, home: str) -> list[str]:
    comment = {SPEC_KEY: order.spec.model_dump(mode="json", exclude_unset=True), KEY: key}
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
        "deadline": slurm_time(order.deadline_s) if order.deadline_s else None,
        "container-image": order.container_image,
        "time": str(math.ceil(order.time_limit_s / 60)) if order.time_limit_s else None,
    }
    return [*words, *(f"--{name}={value}" for name, value in named.items() if value is not None)]


def _is_array(order: Submission) -> bool:
    """Whether sbatch would submit an array, by the environment or by #SBATCH lines before the script's first command."""
    if "SBATCH_ARRAY_INX" in order.environment:
        return True
    return any(word.startswith(("-a", "--ar")) for word in _words_of_script(order))


def _words_of_script(order: Submission) -> list[str]:
    """The words of the #SBATCH lines before the script's first command."""
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), (order.script or "").splitlines())
    return [word for line in head if line.startswith("#SBATCH") for word in line.split()[1:]]


def _variables(order: Submission, account: Account) -> dict[str, str]:
    """The variables of the job, as far as its user and the host say."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        **order.environment,
    }


LIMITS = ("CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS")
"""Limits of a process that sbatch passes on to the job (PropagateResourceLimits), as setrlimit(2) calls them."""


def _variables_of_sbatch(order: Submission) -> dict[str, str]:
    """Variables that sbatch gives to a job by itself, but on 22.05 not beside --export-file. The job does not see the limits."""
    soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in LIMITS}
    soft["NOFILE"] = open_files.limit_as_found()
    found = {f"SLURM_RLIMIT_{name}": str(value % 2**64) for name, value in soft.items()}  # -1: no limit
    return {"SLURM_JOB_NAME": order.name or "sbatch"} | found


def _script(command: Sequence[str]) -> str:
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


@contextlib.contextmanager
def _exported(variables: Mapping[str, str]) -> Iterator[int]:
    """A descriptor from which sbatch reads a job's variables (--export-file)."""
    fd = os.memfd_create("penstock-job-environment")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.writelines(f"{name}={value}\0".encode() for name, value in variables.items())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _key(comment: str) -> str | None:
    try:
        document = json.loads(comment)
    except (ValueError, RecursionError):  # a user may nest it a thousand deep
        return None
    found = document.get(KEY) if isinstance(document, dict) else None
    return found if isinstance(found, str) else None
