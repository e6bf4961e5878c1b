"""Back end `cli`: Slurm's own commands. Works with every Slurm and needs nothing else; about 5 ms a call."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from penstock_slurm.gateway.base import (
    STAND_IN,
    JobPlacement,
    PlainShape,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    SlurmRun,
    Write,
    slurm_minutes,
)
from penstock_slurm.gateway.errors import (
    BackendMissing,
    ControllerAway,
    JobGone,
    Refused,
    SlurmError,
    TimedOut,
    Transient,
    UnreadableAnswer,
    Unregistered,
    error_from,
)
from penstock_slurm.gateway.parse import (
    ASSOCIATION_FIELDS,
    QOS_FIELDS,
    RUN_FIELDS,
    parse_associations,
    parse_fair_shares,
    parse_features,
    parse_gpu_indexes,
    parse_gpus_held,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_qos,
    parse_reservations,
    parse_runs,
    parse_switches,
    parse_version,
    squeue_format,
)

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

COMMANDS = ("scontrol", "squeue", "scancel")

KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Slurm's variables that say which Slurm and who we are. All others change what commands print or do."""

RETRIES = 2
RETRY_PAUSE_S = 0.2
"""Slurm 24.11 refused 1 of 540 updates with `Resource temporarily unavailable`; the next try went through."""

LONGEST_TEXT = 100_000
"""Bytes of an admin comment. Linux takes 131,072 in one argument of a command."""

JOB_ID = re.compile(r"\d+(_\d+)?")

WORD = re.compile(r"[A-Za-z0-9_.,:=/+@-]+")
"""A word that scontrol's own prompt takes as it is."""

MARK = "penstock-after-"
UNKNOWN_WORD = "invalid keyword: "
"""How scontrol answers to a command that it does not know."""

UPDATES = frozenset({"update", "hold", "release"})
"""scontrol's commands that Slurm does not carry out for a job that slurmdbd has not registered."""

UNREGISTERED = re.compile(r"the DB index is being set.* for job (\S+)$", re.MULTILINE)
"""How scontrol says so, and of which job."""

UNREGISTERED_S = 60.0
"""Pause before Slurm is asked again to change such a job: each time it takes 5 s of the time that a command has."""

FIRST = 4_294_967_293
"""The highest priority that Slurm takes, for jobs that run without GPUs: they start before the placeholder jobs of the GPU
reservation, and these before all others. Slurm itself gives about 2 ** 32 - 2 ** 16 and less where it has no weights, and
far less where it has."""

FEEDS = 2
"""Commands at once: an update is three questions to slurmctld, and scontrol reads its input a letter at a time."""

RUNS_AT_ONCE = 1000
"""Jobs whose runs one sacct is asked for."""

FEW = 20
"""Writes that one command takes alone."""

AT_ONCE = 200
MOST_PER_S = 500.0
"""Writes. slurmctld also has users to answer: see docs/developer/slurm-gateway.md for what they notice."""


class CliGateway:
    """Slurm through scontrol, squeue, scancel and, with accounting, sacctmgr and sshare; see `Gateway` for each method."""

    def __init__(self, *, conf: Path | None, timeout_s: float) -> None:
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise BackendMissing(
                f"not on PATH ({os.environ.get('PATH', '')}); install Slurm's commands (Debian: slurm-client) or add "
                "their folder to PATH",
                command=", ".join(missing),
            )
        self._timeout_s = timeout_s
        self._environment = _environment(os.environ, conf)
        self._unregistered: dict[str, float] = {}
        """Jobs that slurmdbd has not registered -> when Slurm last said so."""

    def version(self) -> tuple[int, int]:
        """Of the commands on this machine."""
        return _read(parse_version, self._ask("scontrol", "-V"), "scontrol -V")

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes that slurmctld shows."""
        return _read(parse_nodes, self._ask("scontrol", "-a", "-o", "-d", "show", "node"), "scontrol show node")

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """All partitions, hidden ones too."""
        return _read(
            parse_partitions, self._ask("scontrol", "-a", "-o", "show", "partition"), "scontrol show partition"
        )

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs, each array element for itself.

        The separator goes through the environment, which unlike the command's arguments other users cannot see: who
        knew it could write it into a comment and forge jobs. It must not start with a digit (the field's size does).
        """
        separator = f"~{secrets.token_hex(8)}"
        states = ("-t", "all") if finished else ()
        variables = {"SQUEUE_FORMAT2": squeue_format(separator), "SLURM_TIME_FORMAT": "%s"}
        text = self._ask("squeue", "-a", "-h", "-r", "--local", *states, variables=variables)
        return _read(lambda answer: parse_jobs(answer, separator), text, "squeue")

    def describe(self, job_id: str) -> str:
        """One job in scontrol's words."""
        return self._show_job(job_id)

    def _show_job(self, job_id: str, *options: str) -> str:
        _expect_id(job_id)
        variables = {"SLURM_TIME_FORMAT": "%s"}
        done = self._run(("scontrol", "-a", "-o", *options, "show", "job", job_id), variables, job_id)
        if done.returncode != 0:
            raise error_from(done.stderr or done.stdout, command="scontrol show job", job_id=job_id)
        return done.stdout

    def gpus_held(self, job_id: str) -> int | None:
        """`scontrol -d show job`."""
        return parse_gpus_held(self._show_job(job_id, "-d"))

    def gpu_indexes(self, job_id: str) -> tuple[int, ...]:
        """Indexes of the GPUs that a running job has on its first node."""
        return parse_gpu_indexes(self._show_job(job_id, "-d"))

    def submit_holder(self, name: str, node: str, partition: str, comment: str, after: int | None) -> str:
        """sbatch of a job that holds one GPU of a node and sleeps, before all others; its id.

        Args:
            after: a job at whose end it may start; None: at once.

        Raises:
            Refused: Slurm does not want it: only its root, SlurmUser and operators may ask for a priority.
        """
        words = (
            *("sbatch", "--parsable", f"--job-name={name}", f"--nodelist={node}", f"--partition={partition}"),
            *(
                "--ntasks=1",
                "--gres=gpu:1",
                "--no-requeue",
                f"--priority={FIRST - 1}",
                f"--comment={comment}",
                "--mem=32",
            ),
            *("--output=/dev/null", "--chdir=/", "--export=NONE"),
            *([] if after is None else [f"--dependency=afterany:{after}"]),
            "--wrap=exec sleep infinity",
        )
        done = self._run(words, {})
        if done.returncode != 0:
            raise error_from(done.stderr or done.stdout, command="sbatch", otherwise=Refused)
        return done.stdout.strip().split(";")[0]

    def wait_no_longer(self, job_id: str) -> None:
        """Let a pending job start without the end of the job that it was to wait for."""
        self._write(job_id, "scontrol", "update", f"JobId={job_id}", "Dependency=")

    def no_time_limit(self, job_id: str) -> None:
        """Let a running job go on for ever, whatever its partition's limit."""
        self._write(job_id, "scontrol", "update", f"JobId={job_id}", "TimeLimit=UNLIMITED")

    def set_comment(self, job_id: str, text: str) -> None:
        """Write the comment of a job of ours."""
        self._write(job_id, "scontrol", "update", f"JobId={job_id}", f"Comment={text}")

    def reservations(self) -> tuple[SlurmReservation, ...]:
        """All reservations."""
        variables = {"SLURM_TIME_FORMAT": "%s"}
        text = self._ask("scontrol", "-a", "-o", "show", "reservation", variables=variables)
        return _read(parse_reservations, text, "scontrol show reservation")

    def features(self) -> SlurmFeatures:
        """What is switched on in slurm.conf."""
        return _read(parse_features, self._ask("scontrol", "show", "config"), "scontrol show config")

    def switches(self) -> dict[str, str]:
        """Node -> leaf switch."""
        return _read(parse_switches, self._ask("scontrol", "show", "topology"), "scontrol show topology")

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        """Limits of QOS and associations: two calls of sacctmgr."""
        qos = self._ask("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_FIELDS)}")
        where = (f"cluster={cluster}", f"format={','.join(ASSOCIATION_FIELDS)}")
        associations = self._ask("sacctmgr", "-nP", "show", "assoc", *where)
        return (
            *_read(parse_qos, qos, "sacctmgr show qos"),
            *_read(parse_associations, associations, "sacctmgr show assoc"),
        )

    def fair_shares(self) -> dict[tuple[str, str], float]:
        """(account, user) -> fair-share factor."""
        return _read(parse_fair_shares, self._ask("sshare", "-nPa", "-o", "Account,User,FairShare"), "sshare")

    def runs(self, job_ids: Collection[str], since_s: float) -> tuple[SlurmRun, ...]:
        """`sacct -D`, each RUNS_AT_ONCE jobs."""
        ids: list[str] = list(job_ids)
        found: tuple[SlurmRun, ...] = ()
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_s))
        for at in range(0, len(ids), RUNS_AT_ONCE):
            some = ids[at : at + RUNS_AT_ONCE]
            for job_id in some:
                _expect_id(job_id)
            options = ("-D", "-X", "-n", "-P", "-S", since, "-j", ",".join(some), "-o", ",".join(RUN_FIELDS))
            text = self._ask("sacct", *options, variables={"SLURM_TIME_FORMAT": "%s"})
            found += _read(parse_runs, text, "sacct")
        return found

    def hold(self, job_id: str) -> None:
        """`scontrol hold`: the priority becomes 0 until an admin's release."""
        self._one(Write(job_id, "hold"))

    def release(self, job_id: str) -> None:
        """`scontrol release`."""
        self._one(Write(job_id, "release"))

    def requeue_hold(self, job_id: str) -> None:
        """`scontrol requeuehold Incomplete`; without that word 22.05 brings cancelled jobs back."""
        self._one(Write(job_id, "requeue_hold"))

    def bring_back(self, job_id: str) -> None:
        """`scontrol requeuehold`, of a job that has ended."""
        self._write(job_id, "scontrol", "requeuehold", job_id)

    def cancel(self, job_id: str) -> None:
        """`scancel -v`: without -v it is silent about jobs that do not exist."""
        self._write(job_id, "scancel", "-v", job_id)

    def suspend(self, job_id: str) -> None:
        """`scontrol suspend`."""
        self._write_to_known(job_id, "scontrol", "suspend", job_id)

    def resume(self, job_id: str) -> None:
        """`scontrol resume`."""
        self._write_to_known(job_id, "scontrol", "resume", job_id)

    def place(self, job_id: str, placement: JobPlacement) -> None:
        """One `scontrol update`, so that Slurm takes all of it or nothing."""
        self._one(Write(job_id, "place", placement))

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        """Through the standard input of a few `scontrol` for each AT_ONCE; what passes by itself is asked twice more."""
        errors: dict[str, SlurmError | None] = {}
        left = sorted(writes, key=lambda write: self._turn(write.job_id))
        assert len({write.job_id for write in writes}) == len(writes), "one command about each job"
        for tries_left in range(RETRIES, -1, -1):
            errors |= self._feed(left)
            left = [w for w in left if isinstance(error := errors[w.job_id], Transient) and error.at_once]
            if not left or not tries_left:
                break
            log.info("asking Slurm again", extra={"jobs": len(left), "text": errors[left[0].job_id]})
            time.sleep(RETRY_PAUSE_S)
        for write in writes:
            if errors[write.job_id] is None:
                self._unregistered.pop(write.job_id, None)
        return tuple(errors[write.job_id] for write in writes)

    def _feed(self, writes: Sequence[Write]) -> dict[str, SlurmError | None]:
        """Each write once."""
        errors: dict[str, SlurmError | None] = {}
        for at in range(0, len(writes), AT_ONCE):
            some = writes[at : at + AT_ONCE]
            begun_s = time.monotonic()
            feeds = FEEDS if len(some) > FEW else 1
            with ThreadPoolExecutor(feeds) as pool:
                for found in pool.map(self._feed_some, [some[feed::feeds] for feed in range(feeds)]):
                    errors |= found
            error = errors[some[-1].job_id]
            if isinstance(error, ControllerAway | TimedOut):
                return dict.fromkeys((write.job_id for write in writes), error) | errors
            if at + AT_ONCE < len(writes):
                time.sleep(max(len(some) / MOST_PER_S - (time.monotonic() - begun_s), 0.0))
        return errors

    def _feed_some(self, writes: Sequence[Write]) -> dict[str, SlurmError | None]:
        errors: dict[str, SlurmError | None] = {}
        alike: dict[str, list[Write]] = {}
        for write in writes:
            if JOB_ID.fullmatch(write.job_id) is None:
                errors[write.job_id] = _no_job(write.job_id)
            elif (waits := self._unregistered_now(write.job_id, _words(write))) is not None:
                errors[write.job_id] = waits
            elif not all(map(WORD.fullmatch, _words(write))):
                text = f"{' '.join(_words(write))!r} holds signs that scontrol's prompt takes for its own"
                errors[write.job_id] = Refused(text, command="scontrol", job_id=write.job_id)
            else:
                alone = write.kind in ("place", "split", "put_first") or write.job_id in self._unregistered
                alike.setdefault(write.job_id if alone else write.kind, []).append(write)
        groups = list(alike.values())
        answers = self._talk(groups)
        # Who is meant by an answer to a command about several jobs is not clear, so each is asked by itself.
        again = [
            [write]
            for group, text in zip(groups, answers, strict=True)
            if group[1:] and text and isinstance(text, str)
            for write in group
            if self._unregistered_now(write.job_id, _words(write)) is None
        ]
        for group, said in (*zip(groups, answers, strict=True), *zip(again, self._talk(again), strict=True)):
            errors |= {
                write.job_id: self._unregistered_now(write.job_id, _words(write)) or _error(write, said)
                for write in group
            }
        return errors

    def _talk(self, groups: Sequence[Sequence[Write]]) -> list[str | Transient]:
        """What scontrol says about each group of like writes; "" where it did them, Transient where it may not have."""
        if not groups:
            return []
        lines = []
        for number, group in enumerate(groups):
            others = "".join(f",{write.job_id}" for write in group[1:])
            # Its answers name no command: after each, a word that it does not know says where that command's end.
            lines += [" ".join(_words(group[0])) + others, f"{MARK}{number}"]
        late: TimedOut | None = None
        try:
            said = self._run(("scontrol",), {}, text="\n".join(lines) + "\n").stderr
        except TimedOut as error:
            said, late = error.said, error
        except Transient as error:
            return [error] * len(groups)
        answers: list[str | Transient] = []
        for number in range(len(groups)):
            answer, marked, rest = said.partition(f"{UNKNOWN_WORD}{MARK}{number}\n")
            if not marked:
                stopped = error_from(said, command="scontrol", otherwise=Transient)
                kind = Transient(stopped.text or "scontrol stopped before this", command="scontrol")
                why = late or (stopped if isinstance(stopped, Transient) else kind)
                return answers + [why] * (len(groups) - number)
            answers.append(answer.strip())
            said = rest
        return answers

    def signal(self, job_id: str, where: Literal["batch", "steps"]) -> None:
        """`scancel --signal`, which without --batch leaves the batch script out."""
        self._write(job_id, "scancel", "-v", "--signal=USR2", *(["--batch"] if where == "batch" else []), job_id)

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        """`scontrol update NodeList=`. Without slurmdbd 22.05 thinks for 5 s before it refuses a second time."""
        _expect_id(job_id)
        self._write_once(job_id, ("scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}"))

    def leave_to_slurm(self, job_id: str, shape: PlainShape, cpus: int, after_s: float) -> None:
        """The begin time comes with the shape and before the release, so that nothing starts in between."""
        self._write(
            job_id,
            "scontrol",
            "update",
            f"JobId={job_id}",
            f"Partition={shape.partition}",
            f"NumNodes={shape.nodes}-{shape.nodes}",
            f"NumTasks={shape.nodes}",
            f"NumCPUs={cpus}",
            f"TresPerNode=gres:gpu:{shape.gpus_per_node}",
            "ReqNodeList=",
            f"StartTime=now+{math.ceil(after_s)}",
        )
        self.release(job_id)

    def begin_later(self, job_ids: Sequence[str], after_s: float) -> None:
        """`scontrol update JobId=1,2,3`: it goes on after one that is gone, and says so at the end."""
        begins = f"StartTime=now+{math.ceil(after_s)}"
        jobs = sorted((job for job in job_ids if not self._unregistered_now(job, ("update",))), key=self._turn)
        if not jobs:
            return
        with contextlib.suppress(JobGone, Refused, Unregistered):  # gone, started meanwhile, or not to be changed now
            self._write(jobs[0], "scontrol", "update", f"JobId={','.join(jobs)}", begins)

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """`scontrol update AdminComment=`, the text in one argument."""
        if "\0" in text or len(text.encode(errors="replace")) > LONGEST_TEXT:
            raise Refused(
                f"an admin comment is at most {LONGEST_TEXT} bytes without NUL; shorten it",
                command="scontrol update AdminComment",
                job_id=job_id,
            )
        self._write(job_id, "scontrol", "update", f"JobId={job_id}", f"AdminComment={text}")

    def power_down(self, nodes: Sequence[str]) -> None:
        """`scontrol update State=POWER_DOWN_FORCE`: cloud nodes are given up, and what ran there is queued again."""
        self._ask("scontrol", "update", f"NodeName={','.join(nodes)}", "State=POWER_DOWN_FORCE")

    def _ask(self, *argv: str, variables: Mapping[str, str] | None = None) -> str:
        """What a reading command prints."""
        done = self._run(argv, variables or {})
        if done.returncode != 0 or "error:" in done.stderr:
            otherwise = ControllerAway if done.returncode else UnreadableAnswer  # 0: an unknown field, say
            raise error_from(done.stderr or done.stdout, command=argv[0], otherwise=otherwise)
        return done.stdout

    def _one(self, write: Write) -> None:
        self._write(write.job_id, "scontrol", *_words(write))

    def _write(self, job_id: str, *argv: str) -> None:
        """Run a command that changes a job; what passes by itself is tried again."""
        _expect_id(job_id)
        self._again(lambda: self._write_once(job_id, argv))

    def _write_to_known(self, job_id: str, *argv: str) -> None:
        """Like `_write`, for commands to which 22.05 answers `Unexpected message received` where it has forgotten the job."""
        try:
            self._write(job_id, *argv)
        except ControllerAway as error:
            if "Unexpected message received" not in error.text:
                raise
            self.gpus_held(job_id)  # says JobGone, or that the controller is away after all
            raise

    def _write_once(self, job_id: str, argv: tuple[str, ...]) -> None:
        if (waits := self._unregistered_now(job_id, argv[1:])) is not None:
            raise waits
        done = self._run(argv, {}, job_id)
        # scancel of a job that is gone, and scontrol update with a bad number, print an error and return 0
        if done.returncode != 0 or "error:" in done.stderr:
            raise error_from(done.stderr or done.stdout, command=" ".join(argv[:2]), job_id=job_id)
        self._unregistered.pop(job_id, None)

    def _unregistered_now(self, job_id: str, words: Sequence[str]) -> Unregistered | None:
        """The answer to a command of scontrol about a job that slurmdbd had not registered a moment ago; None: ask Slurm."""
        said_s = self._unregistered.get(job_id)
        if words[0] not in UPDATES or said_s is None or time.monotonic() - said_s >= UNREGISTERED_S:
            return None
        return Unregistered("the DB index is being set", command=f"scontrol {words[0]}", job_id=job_id)

    def _turn(self, job_id: str) -> float:
        """To sort by: jobs that may use up the time of others come last, of them those first that had to wait longest."""
        return self._unregistered.get(job_id, 0.0)

    def _again(self, write: Callable[[], None]) -> None:
        """Call `write`, and twice more where Slurm could not just now."""
        for left in range(RETRIES, -1, -1):
            try:
                write()
                return
            except Transient as error:
                if left == 0 or not error.at_once:
                    raise
                log.info("asking Slurm again", extra={"job": error.job_id, "text": error.text})
                time.sleep(RETRY_PAUSE_S)

    def _run(
        self, argv: tuple[str, ...], variables: Mapping[str, str], job_id: str = "", text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                argv,
                check=False,
                input=text,
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # comments hold any bytes
                timeout=self._timeout_s,
                env={**self._environment, **variables},
            )
        except subprocess.TimeoutExpired as error:
            late = TimedOut(f"no answer in {self._timeout_s:g} s", command=" ".join(argv[:2]), job_id=job_id)
            late.said = (error.stderr or b"").decode(errors="replace")  # bytes, whatever the encoding
            self._note(late.said)
            raise late from None
        except OSError as error:
            raise Transient(f"could not be started: {error}", command=argv[0], job_id=job_id) from error
        self._note(done.stderr)
        return done

    def _note(self, said: str) -> None:
        """Remember which jobs slurmdbd has not registered."""
        self._unregistered |= dict.fromkeys(UNREGISTERED.findall(said), time.monotonic())


def _words(write: Write) -> tuple[str, ...]:
    """The arguments of scontrol.

    NumNodes=n-n because a job with -N1 refuses NumNodes=2; StartTime=now because requeued jobs wait two minutes.
    """
    placement = write.placement
    if write.kind == "put_first":
        return "update", f"JobId={write.job_id}", f"Priority={FIRST}"
    if (
        write.kind == "split"
    ):  # any update of one element gives it a record of its own; this one says what is so already
        return "update", f"JobId={write.job_id}", "Requeue=1"
    if placement is None:
        return {"hold": ("hold",), "release": ("release",), "requeue_hold": ("requeuehold", "Incomplete")}[
            write.kind
        ] + (write.job_id,)
    count = len(placement.nodes)
    without = f"gres:{STAND_IN}:1" if placement.stand_in else ""
    return (
        "update",
        f"JobId={write.job_id}",
        f"Partition={placement.partition}",
        f"NumNodes={count}-{count}",
        *([] if placement.tasks is None else [f"NumTasks={placement.tasks}"]),
        f"NumCPUs={placement.cpus}",
        *([] if placement.cpus_per_task is None else [f"CPUsPerTask={placement.cpus_per_task}"]),
        *([] if placement.memory_mb_per_node is None else [f"MinMemoryNode={placement.memory_mb_per_node}"]),
        f"TresPerNode={f'gres:gpu:{placement.gpus_per_node}' if placement.gpus_per_node else without}",
        f"ReqNodeList={','.join(placement.nodes)}",
        *([] if placement.time_limit_s is None else [f"TimeLimit={slurm_minutes(placement.time_limit_s)}"]),
        "StartTime=now",
    )


def _error(write: Write, said: str | Transient) -> SlurmError | None:
    """What scontrol's answer to this write means."""
    command = f"scontrol {_words(write)[0]}"
    if isinstance(said, Transient):
        return type(said)(said.text, command=command, job_id=write.job_id)
    return error_from(said, command=command, job_id=write.job_id) if said else None


def _no_job(job_id: str) -> JobGone:
    return JobGone("no job has such an id: expected 12 or, for an array's element, 12_3", command="", job_id=job_id)


def _expect_id(job_id: str) -> None:
    if JOB_ID.fullmatch(job_id) is None:
        raise _no_job(job_id)


def _environment(mine: Mapping[str, str], conf: Path | None) -> dict[str, str]:
    """Ours without what a user set to change the commands' output, in the C locale."""
    environment = {
        key: value
        for key, value in mine.items()
        if key in KEPT or not key.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_"))
    }
    environment["LC_ALL"] = "C"
    if conf is not None:
        environment["SLURM_CONF"] = str(conf)
    return environment


def _read(parse: Callable[[str], Answer], text: str, command: str) -> Answer:
    try:
        return parse(text)
    except (ValueError, KeyError, IndexError) as error:
        raise UnreadableAnswer(f"{error!r} in an answer of {len(text)} characters", command=command) from error
