"""Sends many writes through the standard input of a few `scontrol` processes.

A process for each write would take about 5 ms. scontrol's prompt takes one command a line, and a command may name several jobs.
Its answers do not name the command. So each command is followed by a word that scontrol does not know, and the complaint about
that word marks the end of the command's answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock_slurm.gateway.base import ADMIN, STAND_IN, WAITING, Write, slurm_time_limit
from penstock_slurm.gateway.commands import JOB_ID, RETRIES, RETRY_PAUSE_S, SlurmCommandRunner, no_job
from penstock_slurm.gateway.errors import (
    ControllerAway,
    HeldMeanwhile,
    NotWaiting,
    Refused,
    SlurmError,
    TimedOut,
    Transient,
)
from penstock_slurm.gateway.fields import ARGUMENT

log = logging.getLogger(__name__)

MARK = "penstock-after-"
UNKNOWN_COMMAND = "invalid keyword: "
"""The beginning of scontrol's answer to a command that it does not know."""

HIGHEST_PRIORITY = 4_294_967_293
"""The highest priority that Slurm accepts. Jobs that run without GPUs get it, to start before the placeholder jobs of the GPU
reservation, which start before all others. Slurm's own priorities are at most about 2 ** 32 - 2 ** 16."""

FEEDS = 2
"""scontrol processes at once. An update is three requests to slurmctld, and scontrol reads its input one character at a time."""

FEW = 20
"""Up to this many writes go through one process."""

LOOKED_AT = frozenset({"hold", "place", "release", "requeue_hold"})
"""Writes that could lift an admin's hold, or stop a job that runs by now: each job is looked at right before them."""

AT_ONCE = 200
MOST_PER_S = 500.0
"""Writes. slurmctld must also answer users; docs/developer/slurm-gateway.md says what they notice."""


class BatchWriter:
    """Carries out many writes, at most one for each job."""

    def __init__(self, commands: SlurmCommandRunner) -> None:
        self._commands = commands

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        """The error of each write, in their order. Writes that Slurm could not do at the moment are repeated."""
        assert len({write.job_id for write in writes}) == len(writes), "one command about each job"
        looked = [write.job_id for write in writes if write.kind in LOOKED_AT]
        placed = {write.job_id for write in writes if write.kind == "place"}
        admin_holds = {write.job_id for write in writes if write.admin_holds}
        errors = dict[str, SlurmError | None](self.changed(looked, wait=placed, admin_holds=admin_holds))
        left = [write for write in writes if write.job_id not in errors]
        left.sort(key=lambda write: self._commands.order(write.job_id))
        for tries_left in range(RETRIES, -1, -1):
            errors |= self._feed(left)
            left = [w for w in left if isinstance(error := errors[w.job_id], Transient) and error.at_once]
            if not left or not tries_left:
                break
            log.info("asking Slurm again", extra={"jobs": len(left), "text": errors[left[0].job_id]})
            time.sleep(RETRY_PAUSE_S)
        for write in writes:
            if errors[write.job_id] is None:
                self._commands.forget(write.job_id)
        return tuple(errors[write.job_id] for write in writes)

    def changed(
        self, job_ids: Sequence[str], *, wait: Collection[str], admin_holds: Collection[str]
    ) -> dict[str, SlurmError]:
        """An error for each of these jobs that must stay as it is, because it has changed since it was read.

        Somebody may have released or requeued it, so that it runs: Slurm would take a placement as an order to shrink it. An
        admin may have held it: Penstock's right would lift that hold.

        Args:
            wait: those that must still wait.
            admin_holds: those that an admin was known to hold.
        """
        asked = [job_id for job_id in job_ids if JOB_ID.fullmatch(job_id)]
        if not asked:
            return {}
        one = ("-j", *asked) if len(asked) == 1 else ()
        try:
            listed = self._commands.read("squeue", "-a", "-h", "-r", "--local", "-o", "%i %T %r", *one)
        except SlurmError as error:
            return dict.fromkeys(asked, error)
        now = dict(line.partition(" ")[::2] for line in listed.splitlines())
        errors: dict[str, SlurmError] = {}
        for job_id in asked:
            state, _, reason = now.get(job_id, "").partition(" ")
            if job_id in wait and state not in WAITING:
                errors[job_id] = NotWaiting(command="scontrol update", job_id=job_id)
            elif reason == ADMIN and job_id not in admin_holds:
                errors[job_id] = HeldMeanwhile(command="scontrol", job_id=job_id)
        return errors

    def _feed(self, writes: Sequence[Write]) -> dict[str, SlurmError | None]:
        """Send each write once, with pauses for slurmctld."""
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
        """Send writes through one process, those of a kind together."""
        errors: dict[str, SlurmError | None] = {}
        alike: dict[str, list[Write]] = {}
        for write in writes:
            if JOB_ID.fullmatch(write.job_id) is None:
                errors[write.job_id] = no_job(write.job_id)
            elif (waits := self._unregistered(write)) is not None:
                errors[write.job_id] = waits
            elif not all(map(ARGUMENT.fullmatch, arguments(write))):
                text = f"{' '.join(arguments(write))!r} has characters that scontrol's prompt would interpret"
                errors[write.job_id] = Refused(text, command="scontrol", job_id=write.job_id)
            else:
                alone = write.kind in ("place", "split", "put_first") or self._commands.was_unregistered(write.job_id)
                alike.setdefault(write.job_id if alone else write.kind, []).append(write)
        groups = list(alike.values())
        answers = self._ask(groups)
        # An answer about several jobs does not always say which one it is about, so each is sent again by itself.
        again = [
            [write]
            for group, text in zip(groups, answers, strict=True)
            if group[1:] and text and isinstance(text, str)
            for write in group
            if self._unregistered(write) is None
        ]
        for group, answer in (*zip(groups, answers, strict=True), *zip(again, self._ask(again), strict=True)):
            errors |= {write.job_id: self._unregistered(write) or self._error(write, answer) for write in group}
        return errors

    def _ask(self, groups: Sequence[Sequence[Write]]) -> list[str | Transient]:
        """scontrol's answer to each group of writes of one kind: "" if it did them, Transient if it may not have."""
        if not groups:
            return []
        lines = []
        for number, group in enumerate(groups):
            others = "".join(f",{write.job_id}" for write in group[1:])
            if (placement := group[0].placement) is not None and placement.clears_type:
                lines.append(f"update JobId={group[0].job_id} TresPerNode=")
            lines += [" ".join(arguments(group[0])) + others, f"{MARK}{number}"]
        late: TimedOut | None = None
        try:
            output = self._commands.run(("scontrol",), {}, text="\n".join(lines) + "\n", writes=_named(groups)).stderr
        except TimedOut as error:
            output, late = error.output, error
        except Transient as error:
            return [error] * len(groups)
        answers: list[str | Transient] = []
        for number in range(len(groups)):
            answer, marked, rest = output.partition(f"{UNKNOWN_COMMAND}{MARK}{number}\n")
            if not marked:
                stopped = self._commands.messages.error(output, command="scontrol", otherwise=Transient)
                kind = Transient(stopped.text or "scontrol stopped before this", command="scontrol")
                why = late or (stopped if isinstance(stopped, Transient) else kind)
                return answers + [why] * (len(groups) - number)
            answers.append(answer.strip())
            output = rest
        return answers

    def _unregistered(self, write: Write) -> SlurmError | None:
        return self._commands.unregistered(write.job_id, arguments(write))

    def _error(self, write: Write, answer: str | Transient) -> SlurmError | None:
        """The error that scontrol's answer to this write means; None if Slurm did it."""
        command = f"scontrol {arguments(write)[0]}"
        if isinstance(answer, Transient):
            return type(answer)(answer.text, command=command, job_id=write.job_id)
        return self._commands.messages.error(answer, command=command, job_id=write.job_id) if answer else None


def _named(groups: Sequence[Sequence[Write]]) -> str:
    """What these groups of writes do, such as `release 12,13; place 14`, for the log."""
    return "; ".join(f"{group[0].kind} {','.join(write.job_id for write in group)}" for group in groups)


def arguments(write: Write) -> tuple[str, ...]:
    """The arguments of scontrol for a write.

    NumNodes=n-n because a job with -N1 refuses NumNodes=2.
    """
    placement = write.placement
    if write.kind == "put_first":
        return "update", f"JobId={write.job_id}", f"Priority={HIGHEST_PRIORITY}"
    if write.kind == "split":  # any update gives an array's element a record of its own; this one changes nothing else
        return "update", f"JobId={write.job_id}", "Requeue=1"
    if placement is None:
        commands = {"hold": ("uhold",), "release": ("release",), "requeue_hold": ("requeuehold", "Incomplete")}
        return (*commands[write.kind], write.job_id)
    count = len(placement.nodes)
    gpus = f"gres:gpu:{f'{placement.gpu_type}:' if placement.gpu_type else ''}{placement.gpus_per_node}"
    without = f"gres:{STAND_IN}:1" if placement.stand_in else ""
    return (
        "update",
        f"JobId={write.job_id}",
        f"Partition={placement.partition}",
        f"NumNodes={count}-{count}",
        *([] if placement.tasks is None else [f"NumTasks={placement.tasks}"]),
        f"NumCPUs={placement.cpus}",
        *task_counts(placement.tasks_per_node, placement.cpus // count),
        *([] if placement.cpus_per_task is None else [f"CPUsPerTask={placement.cpus_per_task}"]),
        *([] if placement.memory_mb_per_node is None else [f"MinMemoryNode={placement.memory_mb_per_node}"]),
        f"TresPerNode={gpus if placement.gpus_per_node else without}",
        f"ReqNodeList={','.join(placement.nodes)}",
        *([] if placement.time_limit_s is None else [f"TimeLimit={slurm_time_limit(placement.time_limit_s)}"]),
        *(["StartTime=now"] if placement.ends_begin else []),
    )


def task_counts(tasks_per_node: int | None, cpus_per_node: int) -> list[str]:
    """The arguments for a job that was submitted with --ntasks-per-node.

    sbatch has set MinCPUsNode for the first number of tasks, and Slurm starts the job nowhere if NumCPUs is less.
    """
    return [] if tasks_per_node is None else [f"TasksPerNode={tasks_per_node}", f"MinCPUsNode={cpus_per_node}"]
