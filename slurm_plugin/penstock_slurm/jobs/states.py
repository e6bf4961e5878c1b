"""The state machine of a job under Penstock: its states, and the transitions between them.

The state is derived anew at each observation from Slurm's record of the job, the control message in the spool and the job's own
reports. It is never stored, so a lost message or the end of the daemon cannot make it wrong: it is at most as old as the
observation. `docs/developer/control.md` draws the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock_slurm.gateway.base import ENDED, WAITING, SlurmJob


class State(StrEnum):
    """The state of a job."""

    HELD = "held"
    """Penstock keeps the job back, by a hold or by a begin time that it renews. It holds no GPUs and Slurm does not start it."""
    PLACING = "placing"
    """Slurm may start it: where Penstock sent it or, if Slurm or its user requeued it, at its begin time. Or Slurm boots its
    nodes."""
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    """It was asked to save before it has to leave, and has not answered yet."""
    STOPPING = "stopping"
    """It has saved, or does not answer, and is being stopped; or its processes are ending. Its GPUs are not free yet."""
    SUSPENDED = "suspended"
    """Its processes are stopped. In Slurm it keeps its GPUs."""
    DONE = "done"
    """It has ended in any way."""
    LOST = "lost"
    """Its state is not known: one of its nodes is silent, or Slurm has forgotten it and it did not report its end."""


HOLDING = frozenset({"RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"})
"""Slurm's states of a job that holds GPUs and has not ended. STOPPED is by SIGSTOP; the job keeps all that it holds."""

STILL = frozenset({"SUSPENDED", "STOPPED"})

LEAVING = frozenset({"COMPLETING", "STAGE_OUT", "EXPEDITING"})
"""Slurm's states of a job whose run has ended and is being cleaned up. In EXPEDITING (`--requeue=expedite`) Slurm keeps its
nodes for it, and starts it there again at once."""

SLURM_STATES = WAITING | HOLDING | LEAVING | ENDED
"""Every state of `abilities.Release.job_states`. A job in another state has `SlurmJob.unknown`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a job beside Slurm's record of it."""

    asked: bool = False
    """Whether its control message asks it to save and leave."""
    answers: bool = False
    """Whether its present run reads such requests."""
    saved: bool = False
    """Whether it has answered this request."""
    kept_back: bool = False
    """Whether a begin time keeps it back for the daemon; after that time Slurm starts it by itself."""
    silent: bool = False
    """Whether one of its nodes does not respond."""
    ended: bool = False
    """Whether its newest run has reported that the job is over."""
    boots: bool = False
    """Whether Slurm boots its nodes."""


def state(job: SlurmJob | None, facts: Facts) -> State:
    """The state of a job; `job` is None if Slurm does not know it."""
    if job is None:
        return State.DONE if facts.ended else State.LOST
    if job.state in ENDED:
        return State.DONE
    if job.state in WAITING:
        held = job.priority == 0 or job.state in ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
        return State.HELD if held or facts.kept_back else State.PLACING
    if job.state in LEAVING:
        return State.STOPPING
    if job.state not in HOLDING or facts.silent:
        return State.LOST
    if job.state == "CONFIGURING" and facts.boots and not facts.asked:
        return State.PLACING
    if facts.asked:
        return State.CHECKPOINTING if facts.answers and not facts.saved else State.STOPPING
    return State.SUSPENDED if job.state in STILL else State.RUNNING


TRANSITIONS: dict[tuple[State, State], str] = {
    (State.HELD, State.PLACING): "a round allocates GPUs to it: epoch, update, release",
    (State.HELD, State.DONE): "scancel",
    (State.PLACING, State.RUNNING): "Slurm starts it",
    (
        State.PLACING,
        State.HELD,
    ): "a round takes its place back, Slurm does not start it in time, or somebody holds it: hold",
    (State.PLACING, State.STOPPING): "it is cancelled, or Slurm gives its nodes up, while they boot",
    (State.PLACING, State.DONE): "scancel, or its start fails",
    (State.RUNNING, State.CHECKPOINTING): "a round moves or stops it, and it answers requests: it is asked to save",
    (State.RUNNING, State.STOPPING): "a round moves or stops it, and it answers no requests; or its run ends",
    (State.RUNNING, State.SUSPENDED): "scontrol suspend",
    (State.RUNNING, State.DONE): "its work is done, scancel, or its time limit",
    (State.CHECKPOINTING, State.STOPPING): "it answers that it has saved, or its time for that is over: requeuehold",
    (State.CHECKPOINTING, State.RUNNING): "a later round leaves it where it is, or it has given up nodes in place",
    (State.CHECKPOINTING, State.DONE): "its work is done meanwhile, or scancel",
    (State.STOPPING, State.HELD): "Slurm has its GPUs back",
    (State.STOPPING, State.PLACING): "Slurm or its user has requeued it",
    (
        State.STOPPING,
        State.RUNNING,
    ): "a later round leaves it where it is, before it was stopped; or it has given up nodes",
    (State.STOPPING, State.DONE): "Slurm has cleaned up after it",
    (State.SUSPENDED, State.RUNNING): "scontrol resume",
    (State.SUSPENDED, State.STOPPING): "a round needs its GPUs: requeuehold also works on a suspended job",
    (
        State.SUSPENDED,
        State.CHECKPOINTING,
    ): "a round needs its GPUs, and it answers requests; its time to save runs out",
    (State.SUSPENDED, State.DONE): "scancel",
    (State.RUNNING, State.LOST): "one of its nodes falls silent",
    (State.CHECKPOINTING, State.LOST): "one of its nodes falls silent",
    (State.SUSPENDED, State.LOST): "one of its nodes falls silent",
    (State.STOPPING, State.LOST): "one of its nodes falls silent; or slurmctld was killed and has forgotten it",
    (State.HELD, State.LOST): "slurmctld was killed within seconds of its submission and has forgotten it",
    (State.PLACING, State.LOST): "slurmctld was killed within seconds of its submission and has forgotten it",
    (State.LOST, State.RUNNING): "the node answers again",
    (State.LOST, State.CHECKPOINTING): "the node answers again",
    (State.LOST, State.SUSPENDED): "the node answers again",
    (State.LOST, State.STOPPING): "the node answers again, or Slurm gives it up",
    (State.LOST, State.PLACING): "Slurm has given the node up and requeued it; its old run is superseded",
    (State.LOST, State.HELD): "Slurm has given the node up and requeued it, and somebody holds it",
    (State.LOST, State.DONE): "scancel, or Slurm has given the node up and may not requeue it",
    (State.DONE, State.PLACING): "its user requeues it",
    (State.DONE, State.HELD): "its user requeues and holds it",
}
"""Every transition, and its cause. Observations may miss states in between, but show no other transitions."""
