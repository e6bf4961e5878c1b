"""An action and the present state of its job -> the next step. Pure: the shell in `cluster.py` carries it out.

How a job moves from one placement to another, one step a tick::

    RUNNING --ask--> saves --answer or time limit--> requeuehold --> PENDING, held --pause--> place + release --> RUNNING

GPU types are chosen by partition and node list, with an untyped GPU count: Slurm 22.05 cannot change the type of a
pending job's GRES. Only on hosts with several types is a type asked for, and by a job that has already asked for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock_profiles.wire import ControlMessage, Request
from penstock_scheduler.model import (
    Action,
    Hold,
    Job,
    JobId,
    Migrate,
    Outcome,
    Phase,
    Placement,
    Progress,
    Resize,
    Start,
    Stop,
    StopCode,
    host_of,
    on_parts,
)
from penstock_slurm.gateway import JobPlacement, SlurmJob, Write
from penstock_slurm.gateway.base import ADMIN, WAITING
from penstock_slurm.gateway.batch import HIGHEST_PRIORITY
from penstock_slurm.jobs.holds import came_too_late, held_meanwhile
from penstock_slurm.jobs.notes import kept_by_begin, request
from penstock_slurm.jobs.states import LEAVING
from penstock_slurm.observe.view import UNTYPED, Spooled
from penstock_slurm.settings import SlurmSettings

TRIES = 3
"""Attempts in one round to start a job that Slurm refuses."""

MISPLACED = Stop(
    StopCode.SHARING,
    "it shares GPUs that belong to another group of jobs now, and starts again on those of its own group",
)
"""Why a misplaced job is stopped."""

STUCK = Stop(StopCode.PREEMPTED, "it gave up nodes that Slurm did not take from it, and starts again")
"""Why a job is stopped that has left nodes which it still holds."""

Placing = Start | Resize | Migrate
"""Actions with a placement."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is known of an action's job. Times in seconds."""

    slurm: SlurmJob
    job: Job
    spooled: Spooled
    now_s: float
    silent: bool = False
    """Whether one of its nodes does not respond, or boots."""
    lacks_gpus: bool = False
    """Whether Slurm has started it without its GPUs."""
    misplaced: Stop | None = None
    """Why it has to restart although its placement may stay; None: it need not."""
    shares: bool = False
    """Whether it is to start without GPUs of Slurm's, on GPUs of the GPU reservation."""
    hold_lifted: bool = False
    """Whether its record shows a hold that was lifted since."""
    stand_in: bool = False
    """Whether a job that shares requests a GRES in place of GPUs."""
    kept_back: str = ""
    """Why a job that shares cannot start yet; empty: it can."""
    leaves_a_gap: bool = False
    """Whether other jobs use GPUs that it holds in Slurm."""
    free: Mapping[str, int] = field(default_factory=dict)
    """Node -> GPUs that no job holds, less those that are reserved for jobs that share."""
    first: bool = False
    """For a pending job: whether Slurm is to start it before all others, on GPUs that are kept for it."""
    taken: bool = False
    """For a running job: whether others hold the GPUs that it is to get."""
    released_s: float = 0.0
    """For a pending job: since when Slurm may start it."""
    makes_room: bool = False
    """Whether Slurm may still be stopping the plain jobs in its place."""
    revoked_for_s: float = 0.0
    """For a pending job: for how long the credential of its last run has been revoked, at least."""
    tries: int = 0
    """Attempts to start it that Slurm refused in this round."""
    one_record: bool = False
    """Whether it is an array's element that shares a job record with others."""
    signalled: str | None = None
    """The request for which it was signalled."""
    types_stay: bool = False
    """See `SlurmFeatures.gpu_types_stay`."""
    limit_s: float | None = None
    """The time limit of its next start; infinite: none; None: it keeps its limit."""
    left_s: float | None = None
    """The time limit that is left to it when it is stopped now; None: it is not counted over its runs."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next for one action, in this order: `control`, `signal`, `message`, and then `writes`."""

    outcome: Outcome
    """If all writes succeed."""
    writes: tuple[Write, ...] = ()
    """Slurm commands, one after another."""
    control: ControlMessage | None = None
    """For the spool."""
    new_run: bool = False
    """Whether the control message is for a new run, and gets the next epoch."""
    signal: Literal["batch", "steps"] | None = None
    """Which processes to send SIGUSR2, for the request of the control message."""
    message: str = ""
    """For the job's user."""
    freed: Mapping[str, int] = field(default_factory=dict)
    """Node -> GPUs that are free after this step and were not before; negative: the reverse."""

    @property
    def job(self) -> JobId:
        """The action's job."""
        return self.outcome.action.job


LACKS_S = 10.0
"""How long Slurm may say that a job's nodes lack what it needs. It may have looked while another job was still leaving them."""


def under_way(action: Action, text: str, *writes: Write) -> Step:
    """A step after which the action goes on."""
    return Step(Outcome(action, Progress.UNDER_WAY, text), writes)


def step(action: Action, scope: Scope, settings: SlurmSettings) -> Step:
    """The next step of an action. A shrink in place is not among the steps; see `shrinking.py`."""
    slurm = scope.slurm
    if slurm.state in LEAVING:
        return under_way(action, "saves and leaves its GPUs")
    if scope.lacks_gpus:
        return under_way(action, "Slurm started it without its GPUs: it is stopped first")
    if slurm.state in WAITING:
        if isinstance(action, Hold):
            return Step(Outcome(action, Progress.DONE), _hold(slurm), _holding(action, scope))
        return _start(action, scope, settings)
    if stays(action, scope.job, misplaced=scope.misplaced is not None):
        if scope.job.phase is Phase.STARTING:
            return under_way(action, "waits for Slurm to boot its nodes")
        return _stay(action, scope)
    if scope.taken and not scope.misplaced:
        text = "stays where it is until the next round: others have taken the GPUs that it was to get"
        return Step(Outcome(action, Progress.UNDER_WAY, text), control=_withdrawn(action, scope))
    found = _stop(action, scope, settings)
    if scope.misplaced:
        # The plan may have a reason of its own for the same stop, and it is the first one that counts.
        text = f"{found.outcome.text}: {STUCK.text}" if scope.misplaced is STUCK else found.outcome.text
        return dataclasses.replace(found, outcome=dataclasses.replace(found.outcome, text=text, stop=scope.misplaced))
    return found


def stays(action: Action, job: Job, *, misplaced: bool) -> bool:
    """Whether a running job is where the action wants it."""
    if isinstance(action, Hold) or job.allocation is None or misplaced:
        return False
    return action.placement.suits(job.allocation)


# --- a pending job


def _start(action: Placing, scope: Scope, settings: SlurmSettings) -> Step:
    """Send a pending job to its placement."""
    slurm, wanted = scope.slurm, action.placement
    sent_to = scope.job.allocation if scope.job.phase is Phase.STARTING else None
    if sent_to is not None and wanted.suits(sent_to):
        return _await(action, scope, settings)
    if scope.job.nodes is not None and not scope.job.nodes.tried.isdisjoint(wanted.nodes):
        return under_way(
            action, "waits for the next round, which gives it other nodes than those that did not start it"
        )
    if scope.tries >= TRIES:
        text = f"Slurm refused the placement {scope.tries} times: {slurm.reason}"
        return Step(Outcome(action, Progress.FAILED, text))
    if slurm.restarts and scope.revoked_for_s < settings.credential_pause_s:
        return under_way(action, "pauses until Slurm has forgotten the credential of its last run")
    if scope.one_record:
        return under_way(action, "is taken out of its array", Write(slurm.id, "split"))
    back = _own_gpus(scope)
    if scope.shares:
        if scope.kept_back:
            return under_way(action, scope.kept_back)
    elif any(scope.free.get(share.node, 0) + back.get(share.node, 0) < share.gpus for share in wanted.shares):
        return under_way(action, "waits for GPUs that another job still holds")
    if not scope.shares:
        for share in wanted.shares:
            back[share.node] = back.get(share.node, 0) - share.gpus
    return Step(
        Outcome(action, Progress.UNDER_WAY, "waits for Slurm to start it"),
        _sent(scope, wanted),
        _new_run(action, scope),
        new_run=True,
        freed=back,
    )


def _await(action: Placing, scope: Scope, settings: SlurmSettings) -> Step:
    """Wait for Slurm to start a job that was sent to its placement. The cloud limits how long its nodes may take to boot."""
    if scope.makes_room:
        return under_way(action, "waits until Slurm has stopped the plain jobs that it preempts for it")
    if scope.first and 0 < scope.slurm.priority < HIGHEST_PRIORITY:  # the daemon has died after the release
        return under_way(action, "waits for Slurm to start it", Write(scope.slurm.id, "put_first"))
    waited_s = scope.now_s - scope.released_s
    lacks = scope.slurm.reason == "Resources" and not scope.shares
    patience_s = min(settings.start_patience_s, LACKS_S) if lacks else settings.start_patience_s
    if waited_s < patience_s or action.placement.partition == settings.cloud_partition:
        return under_way(action, "waits for Slurm to start it")
    text = f"Slurm did not start it in {waited_s:.0f} s: {scope.slurm.reason}"
    return Step(Outcome(action, Progress.FAILED, text), _hold(scope.slurm), _holding(action, scope))


def _own_gpus(scope: Scope) -> dict[str, int]:
    """GPUs that are counted for the job where it was sent before."""
    if scope.job.allocation is None or scope.slurm.gpus_per_node is None:
        return {}
    return {share.node: share.gpus for share in scope.job.allocation.shares}


def _new_run(action: Placing, scope: Scope) -> ControlMessage:
    """The control message of the next run."""
    slurm, job, before = scope.slurm, scope.job, scope.spooled.control
    limit_s = None if scope.limit_s is None or math.isinf(scope.limit_s) else scope.limit_s
    wanted = action.placement
    shape, share = wanted.configuration, wanted.shares[0]
    return ControlMessage(
        job_id=job.id,
        epoch=0,
        round=action.round,
        gpu_type=shape.gpu_type,
        nodes=shape.nodes,
        gpus=shape.gpus,
        cpus=share.cpus or None,
        memory_mb=share.memory_mb or None,
        submitted_s=job.submit_s,
        submitted_to=(before and before.submitted_to) or next(iter(job.partitions), None),
        submitted_limit_s=(before and before.submitted_limit_s) or (None if slurm.restarts else slurm.time_limit_s),
        slurm_job=None if slurm.array_job_id is None else str(slurm.number),
        time_limit_s=limit_s,
        time_limit_restarts=None if limit_s is None else slurm.restarts,
        holds=slurm.restarts,
        asked_types=_asked_types(scope, wanted),
        holding=None if slurm.held or kept_by_begin(slurm, scope.now_s) else slurm.restarts,
        moved_s=before.moved_s if before is not None else None,
        pauses_s=before.pauses_s if before is not None else (),
        # A cleared job has no GPUs until Slurm has given them back; the daemon may die before that.
        shares=scope.shares or slurm.gpus_per_node is None,
    )


def _typed(scope: Scope, wanted: Placement) -> bool:
    """Whether a job asks Slurm for its GPU type: on parts of hosts, and ever after."""
    asks = on_parts(wanted.nodes) or scope.slurm.gpu_type is not None
    return asks and wanted.gpu_type != UNTYPED and not scope.shares


def _asked_types(scope: Scope, wanted: Placement) -> tuple[str, ...]:
    before = scope.spooled.control.asked_types if scope.spooled.control is not None else ()
    if not scope.types_stay or not _typed(scope, wanted) or wanted.gpu_type in before:
        return before
    return (*before, wanted.gpu_type)


def _sent(scope: Scope, wanted: Placement) -> tuple[Write, ...]:
    """The commands that send a pending job to a placement."""
    slurm, shape, share = scope.slurm, wanted.configuration, wanted.shares[0]
    asked = request(slurm)
    on_node = asked.tasks_on(share.gpus)
    tasks, each = on_node or 1, asked.cpus_per_task(share.gpus)
    cpus = share.cpus or (tasks * each if each else slurm.cpus_for(share.gpus, tasks))
    typed = _typed(scope, wanted)
    place = Write(
        slurm.id,
        "place",
        JobPlacement(
            partition=wanted.partition,
            nodes=tuple(map(host_of, wanted.nodes)),
            gpus_per_node=0 if scope.shares else share.gpus,
            gpu_type=shape.gpu_type if typed else "",
            clears_type=typed and scope.types_stay and slurm.gpu_type != shape.gpu_type,
            stand_in=scope.shares and scope.stand_in,
            tasks=shape.nodes * tasks,
            cpus=shape.nodes * max(cpus, tasks),
            cpus_per_task=max(share.cpus // tasks, 1) if share.cpus else each,
            tasks_per_node=on_node or (1 if each else None),
            memory_mb_per_node=share.memory_mb or asked.memory_mb_on(share.gpus),
            time_limit_s=scope.limit_s,
            ends_begin=slurm.begins_later(scope.now_s),
        ),
    )
    # The placement ends the begin time of a job that it keeps back, so the job needs no release.
    waits_by_begin = kept_by_begin(slurm, scope.now_s)
    sent = (place,) if waits_by_begin else (*_hold(slurm), place, Write(slurm.id, "release"))
    return (*sent, Write(slurm.id, "put_first")) if scope.shares or scope.first else sent


# --- a running job


def _stay(action: Action, scope: Scope) -> Step:
    """The plan leaves the job where it is after all: withdraw the request to save."""
    return Step(Outcome(action, Progress.DONE, "stays where it is"), control=_withdrawn(action, scope))


def _withdrawn(action: Action, scope: Scope) -> ControlMessage | None:
    """The control message without the request to save, if it has one."""
    control = scope.spooled.control
    if control is None or control.request is None:
        return None
    return control.model_copy(update={"request": None, "moved_s": None, "round": action.round})


def _stop(action: Action, scope: Scope, settings: SlurmSettings) -> Step:
    """Stop a running job, one step further: it saves, leaves its GPUs and is held."""
    if scope.silent:
        # Slurm 22.05.8 requeues the job when it gives the node up. If Penstock requeues it before, it starts without GPUs the
        # next time, whatever its TresPerNode says, and Slurm counts those GPUs as used from then on.
        return under_way(action, "waits until its nodes respond, or Slurm gives them up")
    control, slurm, present = _asked(action, scope), scope.slurm, scope.spooled.present
    request = control.request
    assert request is not None, "it was asked"
    asked = scope.spooled.control is not None and scope.spooled.control.request == request
    told = None if asked else control
    signal = present.usr2 if present is not None and scope.signalled != request.id else None
    waited_s = scope.now_s - request.asked_s
    spooled, saved = scope.spooled, asked and scope.spooled.saved
    failure = spooled.failure if asked and not saved else ""
    if failure and spooled.failures == 1:  # the next round knows it, and stops the job only if it must
        return Step(
            Outcome(action, Progress.FAILED, f"it could not save: {failure}"), control=_withdrawn(action, scope)
        )
    late = spooled.answers and not saved
    if late and not failure and 0 <= waited_s < settings.checkpoint_wait_s:
        return Step(Outcome(action, Progress.UNDER_WAY, "was asked to save"), (), told, signal=signal)
    message = _unsaved(spooled, waited_s) if late else ""
    if scope.leaves_a_gap:
        text = "waits until its GPUs are reserved for the jobs that share them"
        return Step(Outcome(action, Progress.UNDER_WAY, text), (), told, signal=signal, message=message)
    how = "has saved" if saved else "gets Slurm's signals to save"
    left = Outcome(action, Progress.UNDER_WAY, f"{how}, leaves its GPUs")
    # A job that shares is stopped like others, also if its user has forbidden Slurm to requeue it.
    allowed = () if slurm.requeue else (Write(slurm.id, "split"),)
    writes = (*allowed, Write(slurm.id, "requeue_hold", admin_holds=slurm.reason == ADMIN))
    return Step(left, writes, _stopping(scope, control), signal=signal, message=message)


def _unsaved(spooled: Spooled, waited_s: float) -> str:
    """Why a run that reads requests is stopped without a checkpoint."""
    if spooled.failure:
        return f"it could not save on {spooled.failures} requests, and was stopped: {spooled.failure}"
    return f"it did not save within {waited_s:.0f} s of the request, and was stopped"


def _stopping(scope: Scope, control: ControlMessage) -> ControlMessage:
    """The control message of a job that is about to be stopped.

    It is in the spool before the job is stopped, because the daemon may die meanwhile.
    """
    slurm = scope.slurm
    # Somebody may have held the running job.
    foreign = held_meanwhile(slurm) and not (scope.hold_lifted or came_too_late(slurm, control))
    kept: dict[str, float | None] = {"holds": None if foreign else slurm.restarts + 1}
    if scope.left_s is not None:
        kept |= {"time_limit_s": scope.left_s, "time_limit_restarts": slurm.restarts + 1}
    return control.model_copy(update=kept)


def _control(action: Action, scope: Scope) -> ControlMessage:
    """The job's control message; a first one if there is none."""
    slurm = scope.slurm
    return scope.spooled.control or ControlMessage(
        job_id=slurm.id,
        epoch=scope.spooled.epoch,
        round=action.round,
        submitted_s=slurm.submit_s,
        submitted_to=slurm.partition[0],
    )


def _asked(action: Action, scope: Scope) -> ControlMessage:
    """The job's control message with a request to save. A request to give up nodes is over."""
    control = _control(action, scope)
    if control.request is not None and not control.request.keep_nodes:
        return control
    request = Request(id=f"{action.round}-{control.epoch}", asked_s=scope.now_s)
    moved_s = None if isinstance(action, Hold) else scope.now_s
    return control.model_copy(update={"request": request, "moved_s": moved_s, "round": action.round})


def _holding(action: Action, scope: Scope) -> ControlMessage | None:
    """The control message that notes that Penstock is about to hold a pending job; None: it is held already."""
    if scope.slurm.held:
        return None
    return _control(action, scope).model_copy(update=dict.fromkeys(("holds", "holding"), scope.slurm.restarts))


def _hold(job: SlurmJob) -> tuple[Write, ...]:
    """The command that holds a pending job; none if it is held already."""
    return () if job.held else (Write(job.id, "hold"),)
