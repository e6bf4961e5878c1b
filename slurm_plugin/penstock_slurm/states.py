"""The state machine of a job under Penstock: in which state it is, and from where to where it may go.

The state is derived anew at each look from what Slurm says of the job, the daemon's word to it in the spool and the job's
own reports; nobody keeps it. So there is no moment at which it can be wrong because a message was lost or the daemon died:
at most it is as old as the look. `docs/developer/architecture.md` draws the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock_slurm.gateway.base import ENDED, SlurmJob


class State(StrEnum):
    """Where a job is."""

    HELD = "held"
    """Kept back by us, by a hold or by a begin time that we renew: it holds no GPUs, and Slurm does not start it."""
    PLACING = "placing"
    """Slurm may start it: where we sent it or, if it was requeued by Slurm or its user, when its begin time comes."""
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    """It was asked to save before it has to leave, and has not said yet that it has."""
    STOPPING = "stopping"
    """It has saved, or does not answer, and is stopped now; or its processes end. Its GPUs are not free yet."""
    SUSPENDED = "suspended"
    """Its processes stand still. In Slurm it keeps its GPUs."""
    BURST = "burst"
    """It runs in the cloud: in Slurm it is held, with a mark that only admins can set."""
    DONE = "done"
    """It has ended, whichever way."""
    LOST = "lost"
    """Nobody can say what it does: a node of its is silent, or Slurm has forgotten it though no end was told."""


WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""Slurm's words for a job that holds nothing."""

HOLDING = frozenset({"RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"})
"""Slurm's words for a job that holds GPUs and has not ended. STOPPED: by SIGSTOP, with all that it holds."""

STILL = frozenset({"SUSPENDED", "STOPPED"})

LEAVING = frozenset({"COMPLETING", "STAGE_OUT"})
"""Slurm's words for a job whose run has ended and which is not done with yet."""

WORDS = WAITING | HOLDING | LEAVING | ENDED
"""Every word that `job_state_string` of Slurm 22.05 and 24.11 can say, but for `?`."""

BURST_MARK = "penstock_burst"
"""Key in the admin_comment of a held job that runs in the cloud."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a job beside Slurm's record of it."""

    asked: bool = False
    """Whether the daemon's present word to it asks it to save and leave."""
    answers: bool = False
    """Whether its present run reads such requests."""
    saved: bool = False
    """Whether it has answered this one."""
    burst: bool = False
    """Whether it bears the mark of jobs in the cloud."""
    kept_back: bool = False
    """Whether a begin time keeps it back for the daemon, after which Slurm starts it alone."""
    silent: bool = False
    """Whether a node of its does not respond."""
    ended: bool = False
    """Whether its newest run has said that it ended for good."""


def state(job: SlurmJob | None, facts: Facts) -> State:
    """The state of a job; `job` None if Slurm does not know it (any more)."""
    if job is None:
        return State.DONE if facts.ended else State.LOST
    if job.state in ENDED:
        return State.DONE
    if job.state in WAITING:
        held = job.priority == 0 or job.state in ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
        if not (held or facts.kept_back):
            return State.PLACING
        return State.BURST if facts.burst else State.HELD
    if job.state in LEAVING:
        return State.STOPPING
    if job.state not in HOLDING or facts.silent:
        return State.LOST
    if facts.asked:
        return State.CHECKPOINTING if facts.answers and not facts.saved else State.STOPPING
    return State.SUSPENDED if job.state in STILL else State.RUNNING


TRANSITIONS: dict[tuple[State, State], str] = {
    (State.HELD, State.PLACING): "a round gives it GPUs: epoch, update, release",
    (State.HELD, State.BURST): "it is sent to the cloud",
    (State.HELD, State.DONE): "scancel",
    (State.PLACING, State.RUNNING): "Slurm starts it",
    (State.PLACING, State.HELD): "a round takes its place back, or Slurm does not start it in time: hold",
    (State.PLACING, State.DONE): "scancel, or its start fails",
    (
        State.RUNNING,
        State.CHECKPOINTING,
    ): "a round wants it elsewhere or waiting, and it answers requests: asked to save",
    (State.RUNNING, State.STOPPING): "a round wants it elsewhere or waiting, and it answers none; or its run ends",
    (State.RUNNING, State.SUSPENDED): "scontrol suspend",
    (State.RUNNING, State.DONE): "its work is done, scancel, its time limit",
    (State.CHECKPOINTING, State.STOPPING): "it says that it has saved, or its time for that is over: requeuehold",
    (State.CHECKPOINTING, State.RUNNING): "a round leaves it where it is after all",
    (State.CHECKPOINTING, State.DONE): "its work is done meanwhile, scancel",
    (State.STOPPING, State.HELD): "Slurm has its GPUs back",
    (State.STOPPING, State.PLACING): "Slurm or its user has requeued it",
    (State.STOPPING, State.RUNNING): "a round leaves it where it is after all, before it was stopped",
    (State.STOPPING, State.DONE): "Slurm has cleaned up after it",
    (State.SUSPENDED, State.RUNNING): "scontrol resume",
    (State.SUSPENDED, State.STOPPING): "a round wants its GPUs: requeuehold works on a suspended job, too",
    (State.SUSPENDED, State.CHECKPOINTING): "likewise, and it would answer: its time for that runs out first",
    (State.SUSPENDED, State.DONE): "scancel",
    (State.BURST, State.HELD): "it is called back from the cloud",
    (State.BURST, State.DONE): "its work is done there, scancel",
    (State.RUNNING, State.LOST): "a node of its falls silent",
    (State.CHECKPOINTING, State.LOST): "likewise",
    (State.SUSPENDED, State.LOST): "likewise",
    (State.STOPPING, State.LOST): "likewise; or slurmctld was killed and has forgotten it",
    (State.HELD, State.LOST): "slurmctld was killed within seconds of its submission and has forgotten it",
    (State.PLACING, State.LOST): "likewise",
    (State.LOST, State.RUNNING): "the node answers again",
    (State.LOST, State.CHECKPOINTING): "likewise",
    (State.LOST, State.SUSPENDED): "likewise",
    (State.LOST, State.STOPPING): "likewise, or Slurm gives the node up",
    (State.LOST, State.PLACING): "Slurm has given the node up and requeued it; the old run is reserved by its epoch",
    (State.LOST, State.HELD): "likewise, and it is held",
    (State.LOST, State.DONE): "scancel, or Slurm has given the node up and may not requeue it",
    (State.DONE, State.PLACING): "its user requeues it",
    (State.DONE, State.HELD): "its user requeues and holds it",
}
"""Every way from one state to another, and what takes it. A look may miss states in between; it sees no way but these."""
