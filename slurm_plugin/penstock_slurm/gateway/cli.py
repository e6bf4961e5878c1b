"""Slurm's own commands, as reader and as writer. Works with every Slurm and needs nothing else; about 5 ms a call."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pwd
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from penstock_scheduler.safety.children import Account
from penstock_scheduler.store.leadership.lease import ALONE
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_slurm.gateway import abilities
from penstock_slurm.gateway.abilities import Release
from penstock_slurm.gateway.accounts import (
    ASSOCIATION_FIELDS,
    END_FIELDS,
    PREEMPTING_FIELDS,
    QOS_FIELDS,
    RUN_FIELDS,
    SHARE_FIELDS,
    parse_associations,
    parse_ends,
    parse_fair_shares,
    parse_preempting,
    parse_qos,
    parse_runs,
)
from penstock_slurm.gateway.base import (
    MOVES,
    MOVES_S,
    PlainShape,
    SlurmEnd,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmQos,
    SlurmReservation,
    SlurmRun,
    Unread,
    Write,
    slurm_minutes,
    slurm_time,
)
from penstock_slurm.gateway.batch import HIGHEST_PRIORITY, BatchWriter, arguments, task_counts
from penstock_slurm.gateway.commands import SlurmCommandRunner, expect_id, failure
from penstock_slurm.gateway.errors import (
    ControllerAway,
    JobGone,
    Refused,
    SlurmError,
    UnreadableAnswer,
    Unregistered,
)
from penstock_slurm.gateway.parse import (
    NodeReader,
    parse_array_limit,
    parse_features,
    parse_gpu_ids,
    parse_gpus_held,
    parse_licences,
    parse_partitions,
    parse_reservations,
    parse_switches,
    parse_version,
)
from penstock_slurm.gateway.parse_jobs import JobReader, Marks, job_fields, squeue_format

if TYPE_CHECKING:  # the agent loads no more than it needs
    from penstock_scheduler.api.ports import Leadership

log = logging.getLogger(__name__)

Given = TypeVar("Given")
Answer = TypeVar("Answer")
Records = TypeVar("Records", tuple[SlurmNode, ...], tuple[SlurmPartition, ...], tuple[SlurmJob, ...])

LONGEST_TEXT = 100_000
"""Bytes of an admin comment. Linux takes 131,072 in one argument of a command."""

MARKS_S = 3600.0
"""How long records of squeue have the same marks."""

RUNS_AT_ONCE = 1000
"""Most jobs in one call of sacct."""


class CommandReader:
    """Reads Slurm through scontrol, squeue and, with accounting, sacctmgr, sacct and sshare; see `SlurmReader`."""

    def __init__(self, commands: SlurmCommandRunner) -> None:
        self._commands = commands
        self._node_reader, self._job_reader = NodeReader(), JobReader()
        self._marks, self._marks_until_s = Marks(), time.monotonic() + MARKS_S
        self._unread: dict[str, tuple[Unread, ...]] = {}
        """Command -> what of its newest answer could not be read."""
        self._release: Release | None = None
        """What the installed commands say; None: their version has to be read."""

    def version(self) -> tuple[int, int]:
        """The version of the commands on this machine."""
        return _read(parse_version, self._commands.read("scontrol", "-V"), "scontrol -V")

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes that slurmctld shows."""

        def ask(release: Release) -> tuple[SlurmNode, ...]:
            return self._node_reader.read(self._commands.read("scontrol", "-a", "-o", "-d", "show", "node"), release)

        return self._records("scontrol show node", ask)

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """All partitions, hidden ones too."""

        def ask(release: Release) -> tuple[SlurmPartition, ...]:
            return parse_partitions(self._commands.read("scontrol", "-a", "-o", "show", "partition"))

        return self._records("scontrol show partition", ask)

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs, each array element as one.

        The marks are random, and in the environment, which other users cannot see as they can see arguments: a user who knew
        them could write them into a comment and forge jobs. They stay the same for MARKS_S, so that records that have not changed
        are recognised by their text.
        """
        states = ("-t", "all") if finished else ()
        return self._listed(self._job_reader, *states)

    def records(self, job_id: str) -> tuple[SlurmJob, ...]:
        """The records of this id, also of jobs that have ended and are not yet purged; empty: slurmctld has none.

        An array's id has those of all its elements. The number of an element has the element's, which has another id.
        """
        try:
            expect_id(job_id)
            return self._listed(JobReader(), "-t", "all", "-j", job_id)
        except JobGone:
            return ()

    def jobs_of(self, user: str) -> tuple[SlurmJob, ...]:
        """The jobs of a user, also those that have ended and are not yet purged; empty: this host knows no such user."""
        try:
            return self._listed(JobReader(), "-t", "all", f"--user={user}")
        except Refused as error:
            log.info("cannot list a user's jobs", extra={"user": user, "text": str(error)})
            return ()

    def _listed(self, reader: JobReader, *options: str) -> tuple[SlurmJob, ...]:
        marks = self._present_marks()

        def ask(release: Release) -> tuple[SlurmJob, ...]:
            asked_s = site_time_s()
            found = reader.read(self._squeue(job_fields(release), marks, *options), marks, release, asked_s)
            self._unread["squeue"] = tuple(Unread("job", each.text or "") for each in reader.lost)
            return found

        return self._records("squeue", ask)

    def _present_marks(self) -> Marks:
        if time.monotonic() >= self._marks_until_s:
            self._marks, self._marks_until_s = Marks(), time.monotonic() + MARKS_S
        return self._marks

    def _squeue(self, fields: Sequence[str], marks: Marks, *options: str) -> str:
        """squeue's answer with these fields of each job."""
        variables = {"SQUEUE_FORMAT2": squeue_format(marks, fields), "SLURM_TIME_FORMAT": "%s"}
        return self._commands.read("squeue", "-a", "-h", "-r", "--local", *options, variables=variables)

    def _records(self, command: str, ask: Callable[[Release], Records]) -> Records:
        """The answer to `ask`. If it cannot be read in whole, the next call reads the version: Slurm may have been upgraded."""
        release = self._release or abilities.release(self.version())
        self._release = None
        found = _read(ask, release, command)
        if not any(record.unknown for record in found):
            self._release = release
        return found

    def _listing(self, kind: str, parse: Callable[[str, list[str]], Answer], text: str) -> Answer:
        """What `parse` makes of a listing. Lines that it cannot read are `unread`."""
        lost: list[str] = []
        found = parse(text, lost)
        self._unread[kind] = tuple(Unread(kind, each) for each in lost)
        return found

    def unread(self) -> tuple[Unread, ...]:
        """See `SlurmReader`."""
        messages = [Unread("message", text, count) for text, count in self._commands.messages.unknown.items()]
        return (*(each for found in self._unread.values() for each in found), *messages)

    def describe(self, job_id: str) -> str:
        """The output of `scontrol show job`."""
        return _show_job(self._commands, job_id)

    def knows(self, job_id: str) -> bool:
        """Whether `scontrol show job` finds the job."""
        try:
            _show_job(self._commands, job_id)
        except JobGone:
            return False
        return True

    def array_limit(self, job_id: str) -> int | None:
        """From `scontrol show job`: squeue does not print it once elements have records of their own."""
        return _read(parse_array_limit, _show_job(self._commands, job_id), "scontrol show job")

    def gpus_held(self, job_id: str) -> int | None:
        """GPUs that Slurm has allocated to a job, from `scontrol -d show job`."""
        return parse_gpus_held(_show_job(self._commands, job_id, "-d"))

    def gpu_indexes(self, job_id: str, node: str) -> tuple[int, ...]:
        """Indexes of a running job's GPUs on one of its nodes."""
        return _read(parse_gpu_ids, _show_job(self._commands, job_id, "-d"), "scontrol show job").get(node, ())

    def gpu_ids(self, job_id: str) -> dict[str, tuple[int, ...]]:
        """Node -> indices of a running job's GPUs there. Empty: they are not known, or the job holds none."""
        try:
            return _read(parse_gpu_ids, _show_job(self._commands, job_id, "-d"), "scontrol show job")
        except SlurmError as error:
            log.info("cannot read the indices of a job's GPUs", extra={"job": job_id, "text": str(error)})
            return {}

    def free_licences(self) -> dict[str, int]:
        """Licence -> how many are free."""
        return _read(
            parse_licences, self._commands.read("scontrol", "-o", "show", "licenses"), "scontrol show licenses"
        )

    def reservations(self) -> tuple[SlurmReservation, ...]:
        """All reservations but `MOVES`, which keeps jobs from no place that Penstock gives them."""
        variables = {"SLURM_TIME_FORMAT": "%s"}
        found = parse_reservations(
            self._commands.read("scontrol", "-a", "-o", "show", "reservation", variables=variables)
        )
        return tuple(each for each in found if each.name != MOVES)

    def features(self) -> SlurmFeatures:
        """What slurm.conf enables."""
        return _read(parse_features, self._commands.read("scontrol", "show", "config"), "scontrol show config")

    def controller(self) -> str:
        """The cluster's name and the host of its first controller, as slurm.conf has them."""
        text = self._commands.read("scontrol", "show", "config")
        found = dict(re.findall(r"^(ClusterName|SlurmctldHost\[0\]) += (\S+)", text, re.MULTILINE))
        host = found.get("SlurmctldHost[0]", "an unknown host").partition("(")[0]
        return f"cluster {found.get('ClusterName', '')} of {host}"

    def switches(self) -> dict[str, str]:
        """Node -> leaf switch."""
        return self._listing("switch", parse_switches, self._commands.read("scontrol", "show", "topology"))

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        """Limits of QOS and associations, by two calls of sacctmgr."""
        qos = self._commands.read("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_FIELDS)}")
        where = (f"cluster={cluster}", f"format={','.join(ASSOCIATION_FIELDS)}")
        associations = self._commands.read("sacctmgr", "-nP", "show", "assoc", *where)
        return (
            *self._listing("QOS", parse_qos, qos),
            *self._listing("association", parse_associations, associations),
        )

    def qos(self) -> tuple[SlurmQos, ...]:
        """`sacctmgr show qos`."""
        asked = self._commands.read("sacctmgr", "-nP", "show", "qos", f"format={','.join(PREEMPTING_FIELDS)}")
        return self._listing("preemption", parse_preempting, asked)

    def fair_shares(self) -> dict[tuple[str, str], float]:
        """(account, user) -> fair-share factor."""
        return self._listing(
            "fair share", parse_fair_shares, self._commands.read("sshare", "-nPa", "-o", ",".join(SHARE_FIELDS))
        )

    def runs(self, job_ids: Collection[str], since_s: float) -> tuple[SlurmRun, ...]:
        """`sacct -D`, for RUNS_AT_ONCE jobs at a time."""
        ids: list[str] = list(job_ids)
        found: tuple[SlurmRun, ...] = ()
        since = slurm_time(since_s)
        for at in range(0, len(ids), RUNS_AT_ONCE):
            some = ids[at : at + RUNS_AT_ONCE]
            for job_id in some:
                expect_id(job_id)
            options = ("-D", "-X", "-n", "-P", "-S", since, "-j", ",".join(some), "-o", ",".join(RUN_FIELDS))
            text = self._commands.read("sacct", *options, variables={"SLURM_TIME_FORMAT": "%s"})
            found += self._listing("run", parse_runs, text)
        return found

    def ends(self, job_ids: Collection[str]) -> dict[str, SlurmEnd]:
        """How these jobs ended, by `sacct -D`, for RUNS_AT_ONCE jobs at a time. Jobs without a record of their end are left out.

        Raises:
            SlurmError: there is no accounting, or it does not answer.
        """
        ids: list[str] = list(job_ids)
        found: dict[str, SlurmEnd] = {}
        for at in range(0, len(ids), RUNS_AT_ONCE):
            some = ids[at : at + RUNS_AT_ONCE]
            for job_id in some:
                expect_id(job_id)
            options = ("-D", "-X", "-n", "-P", "-j", ",".join(some), "-o", ",".join(END_FIELDS))
            text = self._commands.read("sacct", *options, variables={"SLURM_TIME_FORMAT": "%s"})
            found |= self._listing("end", parse_ends, text)
        return found


class CommandWriter:
    """Changes Slurm's jobs through scontrol and scancel; see `SlurmWriter`. The other methods are for sharing and cloud."""

    def __init__(self, commands: SlurmCommandRunner) -> None:
        self._commands = commands
        self._batch = BatchWriter(commands)

    def submit_placeholder(self, name: str, node: str, partition: str, comment: str, after: int | None) -> str:
        """Submit a placeholder job, which holds one GPU of a node and sleeps. Returns its id. It starts before all other jobs.

        Args:
            after: a job after whose end it may start. None: at once.

        Raises:
            Refused: Slurm refuses it. Only root, SlurmUser and operators may set a priority.
        """
        words = (
            *("sbatch", "--parsable", f"--job-name={name}", f"--nodelist={node}", f"--partition={partition}"),
            *(
                "--ntasks=1",
                "--gres=gpu:1",
                "--no-requeue",
                f"--priority={HIGHEST_PRIORITY - 1}",
                f"--comment={comment}",
                "--mem=32",
            ),
            *("--output=/dev/null", "--chdir=/", "--export=NONE"),
            *([] if after is None else [f"--dependency=afterany:{after}"]),
            "--wrap=exec sleep infinity",
        )
        done = self._commands.run(words, {}, writes=f"placeholder job {name}")
        if done.returncode != 0:
            raise self._commands.messages.error(failure(done), command="sbatch", otherwise=Refused)
        return done.stdout.strip().split(";")[0]

    def wait_no_longer(self, job_id: str) -> None:
        """Remove a pending job's dependency on another job."""
        self._commands.change(job_id, "scontrol", "update", f"JobId={job_id}", "Dependency=")

    def no_time_limit(self, job_id: str) -> None:
        """Remove a running job's time limit, also its partition's."""
        self._commands.change(job_id, "scontrol", "update", f"JobId={job_id}", "TimeLimit=UNLIMITED")

    def set_comment(self, job_id: str, text: str) -> None:
        """Write the comment of a job of the daemon's user."""
        self._commands.change(job_id, "scontrol", "update", f"JobId={job_id}", f"Comment={text}")

    def hold(self, job_id: str) -> None:
        """`scontrol uhold`. The priority is 0 until the job is released, and the reason differs from that of an admin's hold."""
        self._one(Write(job_id, "hold"))

    def release(self, job_id: str) -> None:
        """`scontrol release`."""
        self._one(Write(job_id, "release"))

    def requeue_hold(self, job_id: str) -> None:
        """`scontrol requeuehold Incomplete`. Without `Incomplete`, 22.05 would requeue cancelled jobs too."""
        self._one(Write(job_id, "requeue_hold"))

    def bring_back(self, job_id: str) -> None:
        """`scontrol requeuehold` of a job that has ended."""
        self._commands.change(job_id, "scontrol", "requeuehold", job_id)

    def cancel(self, job_id: str, account: Account | None = None) -> None:
        """`scancel -v`, as this account. Without -v, scancel does not report jobs that do not exist."""
        self._commands.change(job_id, "scancel", "-v", job_id, account=account)

    def suspend(self, job_id: str) -> None:
        """`scontrol suspend`."""
        self._change_known(job_id, "scontrol", "suspend", job_id)

    def resume(self, job_id: str) -> None:
        """`scontrol resume`."""
        self._change_known(job_id, "scontrol", "resume", job_id)

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        """Through the standard input of a few scontrol processes, see `batch`."""
        return self._batch.write(writes)

    def signal(self, job_id: str, where: Literal["batch", "steps"]) -> None:
        """`scancel --signal`. Without --batch it does not signal the batch script."""
        self._commands.change(
            job_id, "scancel", "-v", "--signal=USR2", *(["--batch"] if where == "batch" else []), job_id
        )

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        """`scontrol update NodeList=`. Without slurmdbd, 22.05 takes 5 s to refuse a second one."""
        self._commands.change_once(job_id, "scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}")

    def leave_to_slurm(self, job_id: str, shape: PlainShape, cpus: int, after_s: float) -> None:
        """The begin time is set with the shape and before the release, so that the job does not start in between."""
        for error in self._batch.changed([job_id], wait=[job_id], admin_holds=()).values():
            raise error
        self._commands.change(
            job_id,
            "scontrol",
            "update",
            f"JobId={job_id}",
            f"Partition={shape.partition}",
            f"NumNodes={shape.nodes}-{shape.nodes}",
            f"NumTasks={shape.nodes * (shape.tasks_per_node or 1)}",
            f"NumCPUs={cpus}",
            *task_counts(shape.tasks_per_node, cpus // shape.nodes),
            f"TresPerNode=gres:gpu:{shape.gpus_per_node}",
            "ReqNodeList=",
            f"StartTime=now+{math.ceil(after_s)}",
        )
        self.release(job_id)

    def begin_later(self, job_ids: Sequence[str], after_s: float) -> None:
        """`scontrol update JobId=1,2,3`. It continues after a job that has ended, and reports it at the end."""
        begins = f"StartTime=now+{math.ceil(after_s)}"
        known = (job for job in job_ids if not self._commands.unregistered(job, ("update",)))
        jobs = sorted(known, key=self._commands.order)
        if not jobs:
            return
        with contextlib.suppress(
            JobGone, Refused, Unregistered
        ):  # ended or started meanwhile, or cannot be changed now
            self._commands.change(jobs[0], "scontrol", "update", f"JobId={','.join(jobs)}", begins)

    def name_no_nodes(self, job_ids: Sequence[str]) -> None:
        """`scontrol update ReqNodeList=`, which takes one job. To a running job it would mean another thing."""
        started = self._batch.changed(job_ids, wait=job_ids, admin_holds=job_ids)
        for job_id in job_ids:
            if job_id not in started:
                with contextlib.suppress(JobGone, Refused, Unregistered):
                    self._commands.change(job_id, "scontrol", "update", f"JobId={job_id}", "ReqNodeList=")

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """`scontrol update AdminComment=`, with the text in one argument."""
        if "\0" in text or len(text.encode(errors="replace")) > LONGEST_TEXT:
            raise Refused(
                f"an admin comment is at most {LONGEST_TEXT} bytes without NUL; shorten it",
                command="scontrol update AdminComment",
                job_id=job_id,
            )
        self._commands.change(job_id, "scontrol", "update", f"JobId={job_id}", f"AdminComment={text}")

    def power_down(self, nodes: Sequence[str]) -> None:
        """`scontrol update State=POWER_DOWN_FORCE`. It gives cloud nodes up, and requeues the jobs on them."""
        self._commands.change_nodes("scontrol", "update", f"NodeName={','.join(nodes)}", "State=POWER_DOWN_FORCE")

    def keep_nodes(self, nodes: Sequence[str], *, changes: bool) -> None:
        """See `SlurmWriter`. The reservation ends by itself, even if penstockd dies. No job runs in it, and none ends with it."""
        about = f"ReservationName={MOVES}", f"Nodes={','.join(nodes)}", f"EndTime=now+{slurm_minutes(MOVES_S)}minutes"
        if changes:
            self._commands.change_nodes("scontrol", "update", *about)
        else:
            flags = "StartTime=now", f"Users={pwd.getpwuid(os.geteuid()).pw_name}", "Flags=IGNORE_JOBS,OVERLAP"
            self._commands.change_nodes("scontrol", "create", *about, *flags)

    def keep_no_nodes(self) -> None:
        """See `SlurmWriter`."""
        self._commands.change_nodes("scontrol", "delete", f"ReservationName={MOVES}")

    def _one(self, write: Write) -> None:
        self._commands.change(write.job_id, "scontrol", *arguments(write))

    def _change_known(self, job_id: str, *argv: str) -> None:
        """Change a job with a command to which 22.05 answers `Unexpected message received` if it has forgotten the job."""
        try:
            self._commands.change(job_id, *argv)
        except ControllerAway as error:
            if "Unexpected message received" not in error.text:
                raise
            _show_job(self._commands, job_id)  # raises JobGone, unless the controller is indeed down
            raise


class CliGateway(CommandReader, CommandWriter):
    """Reads and changes the Slurm of `conf` through its commands; without `conf`, that of SLURM_CONF or the default.

    Creating it contacts no daemon.

    Raises:
        CommandsMissing: Slurm's commands are not on this machine. It is also a ConfigError.
    """

    def __init__(
        self,
        *,
        conf: Path | None,
        timeout_s: float,
        leadership: Leadership = ALONE,
    ) -> None:
        """`timeout_s` limits one command. `leadership` is asked before each command that changes something."""
        self.commands = SlurmCommandRunner(conf, timeout_s, leadership)
        CommandReader.__init__(self, self.commands)
        CommandWriter.__init__(self, self.commands)


def _show_job(commands: SlurmCommandRunner, job_id: str, *options: str) -> str:
    expect_id(job_id)
    variables = {"SLURM_TIME_FORMAT": "%s"}
    done = commands.run(("scontrol", "-a", "-o", *options, "show", "job", job_id), variables, job_id)
    if done.returncode != 0:
        raise commands.messages.error(failure(done), command="scontrol show job", job_id=job_id)
    return done.stdout


def _read(parse: Callable[[Given], Answer], given: Given, command: str) -> Answer:
    try:
        return parse(given)
    except (ValueError, KeyError, IndexError) as error:
        raise UnreadableAnswer(f"the answer cannot be read: {error!r}", command=command) from error
