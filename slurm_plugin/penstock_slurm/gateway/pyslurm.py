"""Back end `pyslurm`: libslurm in this process, without a command for each call. Optional: pyslurm is GPL-2.0.

No release of pyslurm passes the contract tests, so that `open_gateway` refuses this back end, and only those tests open it:
docs/decisions/0015-pyslurm-is-refused.md. pyslurm must be of the site's Slurm release. libslurm reads one slurm.conf for the
whole process, and ends the process if there is none; this back end checks both first. The time limit is Slurm's MessageTimeout,
not `timeout_s`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock_slurm.gateway import abilities
from penstock_slurm.gateway.abilities import Release
from penstock_slurm.gateway.base import (
    ENDED,
    WAITING,
    JobPlacement,
    PlainShape,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    SlurmRun,
    Unknown,
    Write,
    slurm_minutes,
)
from penstock_slurm.gateway.errors import (
    BackendMissing,
    ControllerAway,
    JobGone,
    Messages,
    NotWaiting,
    Refused,
    SlurmError,
    Transient,
)
from penstock_slurm.gateway.fields import YEAR_S, Fields
from penstock_slurm.gateway.hostlist import expand
from penstock_slurm.gateway.parse import parse_state

Answer = TypeVar("Answer")

DEFAULT_CONF = Path("/etc/slurm/slurm.conf")
TRIES = 3
PAUSE_S = 0.2


def _minutes(limit_s: float) -> int | str:
    return "UNLIMITED" if math.isinf(limit_s) else slurm_minutes(limit_s)


class PyslurmGateway:
    """Slurm through pyslurm; see `Gateway` for each method."""

    def __init__(self, *, conf: Path | None, timeout_s: float) -> None:
        del timeout_s  # libslurm has its own limit
        wanted = str(conf) if conf is not None else os.environ.get("SLURM_CONF", str(DEFAULT_CONF))
        if not Path(wanted).is_file():
            raise BackendMissing(f"there is no {wanted}; set [slurm] conf", command="pyslurm")
        before = os.environ.get("SLURM_CONF")
        if loaded and loaded[0] != wanted:
            raise BackendMissing(
                f"this process already uses the Slurm of {loaded[0]}; libslurm reads only one slurm.conf",
                command="pyslurm",
            )
        os.environ["SLURM_CONF"] = wanted
        try:
            self._pyslurm: Any = importlib.import_module("pyslurm")
        except ImportError as error:
            if before is None:
                del os.environ["SLURM_CONF"]
            else:
                os.environ["SLURM_CONF"] = before
            raise BackendMissing(
                f"{error}; install the pyslurm of your Slurm's release (docs/developer/slurm-gateway.md)",
                command="pyslurm",
            ) from None
        loaded[:] = [wanted]
        self._messages = Messages()

    def version(self) -> tuple[int, int]:
        """The release of the libslurm for which pyslurm was built."""
        major, minor, *_ = self._pyslurm.__version__.split(".")
        return int(major), int(minor)

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes that slurmctld shows, by two calls: 22.5.3 has no allocated GRES of nodes, so the jobs' are added up."""
        found = self._ask("load nodes", "", self._pyslurm.Nodes.load)
        jobs = self._ask("load jobs", "", self._pyslurm.Jobs.load)
        used: dict[str, dict[str, int]] = {}
        for job in jobs.values():
            if str(job.state).upper() in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"):
                for name, layout in job.get_resource_layout_per_node().items():
                    for gpu_type, count in _gres(layout.get("gres")).items():
                        on_node = used.setdefault(name, {})
                        on_node[gpu_type] = on_node.get(gpu_type, 0) + count
        release = abilities.release(self.version())
        return tuple(_node(node, used.get(node.name, {}), release) for node in found.values())

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """All partitions."""
        found = self._ask("load partitions", "", self._pyslurm.Partitions.load)
        return tuple(
            SlurmPartition(
                name=partition.name,
                nodes=expand(partition.nodes or ""),
                up=str(partition.state).upper() == "UP",
                state=str(partition.state).upper(),
                default=bool(partition.is_default),
                max_time_s=None if isinstance(partition.max_time, str | None) else float(partition.max_time) * 60,
            )
            for partition in found.values()
        )

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs. Elements of an array that have not started are one record."""
        found = self._ask("load jobs", "", self._pyslurm.Jobs.load)
        release = abilities.release(self.version())
        jobs = (_job(job, release) for job in found.values())
        return tuple(job for job in jobs if finished or job.state not in ENDED)

    def reservations(self) -> tuple[SlurmReservation, ...]:
        """None: this back end does not read reservations yet, also not those of jobs."""
        return ()

    def knows(self, job_id: str) -> bool:
        """Whether the job can be loaded."""
        try:
            self._ask("load job", job_id, lambda: self._pyslurm.Job.load(int(job_id)))
        except JobGone:
            return False
        return True

    def array_limit(self, job_id: str) -> int | None:
        """None: this back end does not read it yet."""
        del job_id
        return None

    def gpus_held(self, job_id: str) -> int | None:
        """None: this back end does not read it yet."""
        del job_id
        return None

    def features(self) -> SlurmFeatures:
        """None: this back end does not read topology, limits and fair shares yet."""
        return SlurmFeatures()

    def switches(self) -> dict[str, str]:
        """None, see `features`."""
        return {}

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        """None, see `features`."""
        del cluster
        return ()

    def fair_shares(self) -> dict[tuple[str, str], float]:
        """None, see `features`."""
        return {}

    def runs(self, job_ids: Collection[str], since_s: float) -> tuple[SlurmRun, ...]:
        """None, see `features`."""
        del job_ids, since_s
        return ()

    def hold(self, job_id: str) -> None:
        """Keep a pending job from starting."""
        self._write("hold", job_id, lambda job: job.hold("user"))

    def release(self, job_id: str) -> None:
        """Let a held job start."""
        self._write("release", job_id, lambda job: job.release())

    def requeue_hold(self, job_id: str) -> None:
        """Stop a running job. After a while it is pending and held."""
        try:
            self._write("requeue", job_id, lambda job: job.requeue(hold=True))
        except Refused as error:
            if "pending execution" not in error.text:
                raise

    def bring_back(self, job_id: str) -> None:
        """Requeue a job that has failed, and hold it."""
        self._write("requeue", job_id, lambda job: job.requeue(hold=True))

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        self._write("cancel", job_id, lambda job: job.cancel())

    def suspend(self, job_id: str) -> None:
        """Suspend a running job."""
        self._write("suspend", job_id, lambda job: job.suspend())

    def resume(self, job_id: str) -> None:
        """Resume a suspended job."""
        self._write("resume", job_id, lambda job: job.unsuspend())

    def _place(self, job_id: str, placement: JobPlacement) -> None:
        """One modification, so that Slurm applies all of it or nothing."""
        if placement.tasks_per_node is not None:
            raise Refused("--ntasks-per-node needs the back end cli", command="modify", job_id=job_id)
        self._expect_waiting(job_id)
        count, tasks = len(placement.nodes), placement.tasks or len(placement.nodes)
        change = self._pyslurm.JobSubmitDescription(
            partitions=placement.partition,
            nodes=f"{count}-{count}",
            ntasks=tasks,
            cpus_per_task=max(placement.cpus // tasks, 1),
            gres_per_node=f"gpu:{placement.gpus_per_node}",
            required_nodes=",".join(placement.nodes),
            **({"begin_time": "now"} if placement.ends_begin else {}),
            **({} if (limit_s := placement.time_limit_s) is None else {"time_limit": _minutes(limit_s)}),
            **({} if placement.memory_mb_per_node is None else {"memory_per_node": f"{placement.memory_mb_per_node}M"}),
        )
        self._write("modify", job_id, lambda job: job.modify(change))

    def signal(self, job_id: str, where: Literal["batch", "steps"]) -> None:
        """Refused: only the back end cli sends signals."""
        raise Refused(f"SIGUSR2 to its {where} needs the back end cli", command="signal", job_id=job_id)

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        """Refused: only the back end cli shrinks jobs."""
        raise Refused(f"shrinking to {','.join(nodes)} needs the back end cli", command="shrink", job_id=job_id)

    def leave_to_slurm(self, job_id: str, shape: PlainShape, cpus: int, after_s: float) -> None:
        """The begin time is set with the shape and before the release, so that the job does not start in between."""
        self._expect_waiting(job_id)
        change = self._pyslurm.JobSubmitDescription(
            partitions=shape.partition,
            nodes=f"{shape.nodes}-{shape.nodes}",
            ntasks=shape.nodes,
            cpus_per_task=max(cpus // shape.nodes, 1),
            gres_per_node=f"gpu:{shape.gpus_per_node}",
            required_nodes="",
            begin_time=f"now+{math.ceil(after_s)}",
        )
        self._write("modify", job_id, lambda job: job.modify(change))
        self.release(job_id)

    def begin_later(self, job_ids: Sequence[str], after_s: float) -> None:
        """One modification for each job."""
        change = self._pyslurm.JobSubmitDescription(begin_time=f"now+{math.ceil(after_s)}")
        for job_id in job_ids:
            with contextlib.suppress(JobGone, Refused):
                self._write("modify", job_id, lambda job: job.modify(change))

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """Write the comment that only admins can write."""
        change = self._pyslurm.JobSubmitDescription(admin_comment=text)
        self._write("modify", job_id, lambda job: job.modify(change))

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        """One after another: libslurm takes about 1 ms for each."""
        errors: list[SlurmError | None] = []
        for write in writes:
            away = errors[-1] if errors and isinstance(errors[-1], ControllerAway) else None
            errors.append(away or self._write_one(write))
        return tuple(errors)

    def _expect_waiting(self, job_id: str) -> None:
        """Raise NotWaiting if the job does not wait."""
        _expect_number(job_id, "load job")
        job = self._ask("load job", job_id, lambda: self._pyslurm.Job.load(int(job_id)))
        if str(job.state).upper() not in WAITING:
            raise NotWaiting(command="modify", job_id=job_id)

    def _write_one(self, write: Write) -> SlurmError | None:
        try:
            if write.kind == "split":  # elements that have not started have no id in pyslurm
                return Refused("elements of job arrays need the back end cli", command="modify", job_id=write.job_id)
            if write.kind == "put_first":
                return Refused("jobs that share GPUs need the back end cli", command="modify", job_id=write.job_id)
            if write.placement is not None:
                self._place(write.job_id, write.placement)
            else:
                {"hold": self.hold, "release": self.release, "requeue_hold": self.requeue_hold}[write.kind](
                    write.job_id
                )
        except SlurmError as error:
            return error
        return None

    def _write(self, command: str, job_id: str, write: Callable[[Any], object]) -> None:
        _expect_number(job_id, command)
        for left in range(TRIES - 1, -1, -1):
            try:
                self._ask(command, job_id, lambda: write(self._pyslurm.Job(int(job_id))))
                return
            except Transient as error:
                if left == 0 or not error.at_once:
                    raise
                time.sleep(PAUSE_S)

    def _ask(self, command: str, job_id: str, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except self._pyslurm.PyslurmError as error:
            otherwise = Refused if job_id else ControllerAway
            raise self._messages.error(
                str(error), command=f"pyslurm {command}", job_id=job_id, otherwise=otherwise
            ) from None


loaded: list[str] = []
"""The slurm.conf that libslurm has read in this process, if any."""


def _expect_number(job_id: str, command: str) -> None:
    if not job_id.isdigit():
        raise JobGone("no job has such an id here: expected a number", command=command, job_id=job_id)


def _gres(counts: dict[str, Any] | None) -> dict[str, int]:
    """GPUs by type from pyslurm's `{'gpu:rtx': 8}` or `{'gpu:rtx': {'count': '8', …}}`; an untyped `gpu` has the type ""."""
    found: dict[str, int] = {}
    for name, count in (counts or {}).items():
        kind, _, gpu_type = str(name).partition(":")
        if kind == "gpu":
            found[gpu_type] = found.get(gpu_type, 0) + int(count["count"] if isinstance(count, dict) else count)
    return found


def _node(node: Any, gpus_used: dict[str, int], release: Release) -> SlurmNode:
    gpus, state = _gres(node.configured_gres), parse_state(str(node.state))
    return SlurmNode(
        name=node.name,
        gpus=gpus,
        gpus_used=dict.fromkeys(gpus, 0) | gpus_used,
        state=state,
        partitions=tuple(node.partitions or ()),
        cpus=int(node.total_cpus or 0),
        cpus_used=int(node.allocated_cpus or 0),
        memory_mb=int(node.real_memory or 0),
        memory_used_mb=int(node.allocated_memory or 0),
        reason=node.reason or "",
        unknown=(Unknown("State", str(node.state)),) if state - release.node_states else (),
        features=tuple(sorted(node.active_features or ())),
    )


def _job(job: Any, release: Release) -> SlurmJob:
    gpus = _gres(job.gres_per_node)
    types = [gpu_type for gpu_type in gpus if gpu_type]
    element = job.array_id is not None and job.array_task_id is not None
    record = Fields({"State": str(job.state).upper(), release.whole_nodes_field: _whole_nodes(job, release)})
    state = record.word("State", release.job_states)
    started = state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD")
    limit = job.time_limit
    return SlurmJob(
        id=f"{job.array_id}_{job.array_task_id}" if element else str(job.id),
        number=int(job.id),
        name=job.name or "",
        user=job.user_name or "",
        uid=int(job.user_id),
        account=job.account or "",
        partition=tuple((job.partition or "").split(",")),
        state=state,
        reason=job.state_reason or "",
        nodes=expand(job.allocated_nodes or "") if started else (),
        required_nodes=expand(job.required_nodes or ""),
        node_count=int(job.num_nodes or 0),
        gpus_per_node=sum(gpus.values()) if gpus else None,
        gpu_type=types[0] if types else None,
        cpus=int(job.cpus or 0),
        cpus_per_task=int(job.cpus_per_task or 1),
        tasks=int(job.ntasks or 1),
        comment=job.comment or "",
        admin_comment=job.admin_comment or "",
        submit_s=float(job.submit_time or 0),
        eligible_s=_time(job.eligible_time),
        start_s=_time(job.start_time) if started else None,
        end_s=_time(job.end_time),
        time_limit_s=None if not isinstance(limit, int | float) or limit * 60 == YEAR_S else float(limit) * 60,
        restarts=int(job.requeue_count or 0),
        requeue=bool(job.is_requeueable),
        priority=int(job.priority or 0),
        qos=job.qos or "",
        array_job_id=job.array_id,
        array_task_id=job.array_task_id,
        het_job_id=job.heterogeneous_id,
        cpus_per_gpu=int(job.cpus_per_gpu) if job.cpus_per_gpu else None,
        exclusive=record.read(release.whole_nodes_field, release.whole_nodes.__getitem__, False),
        unknown=tuple(record.unknown),
    )


def _whole_nodes(job: Any, release: Release) -> str:
    """Slurm's word for whether the job has whole nodes: of `JobExclusive` from pyslurm 26.05 on, of `resource_sharing` before."""
    word = job.exclusive if release.whole_nodes_field == "Exclusive" else job.resource_sharing
    return str(getattr(word, "name", word)).upper()


def _time(seconds: int | None) -> float | None:
    return float(seconds) if seconds else None
