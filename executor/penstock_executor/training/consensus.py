"""What the processes of a run agree on: one short vector of numbers, added up over all processes.

Once a step, or every few steps if steps are short, each process contributes a `Vote`: its share of the squared norms of
the gradients, and whether it was asked to save or to stop. The sum is read one step later, so that no process waits for
it, and all processes act on it after the same step. So a signal may reach any process at any time, and each checkpoint
still holds whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penstock_executor.training.gradients import PendingNorms
from penstock_executor.training.processes import Group

VOTE_EVERY_S = 0.5
"""If steps are shorter, the processes vote only every few steps: a vote costs two context switches, and a signal can
wait."""

LONGEST_STRIDE = 16
"""The most steps from one vote to the next."""

COST_CHECKED_EVERY = 48
"""Steps between two checks of what measuring the gradients costs; a multiple of `LONGEST_STRIDE`."""


class Vote(NamedTuple):
    """What one process contributes. In the sum over all processes, a flag is set if it is not 0.

    Only rank 0 sets the fields from `save` to `vote_every`: it alone talks to the daemon.
    """

    local_sqr: float = 0.0
    """This process's share of a step's `penstock_profiles.noise.Moments.local_sqr`."""
    mean_sqr: float = 0.0
    """Likewise of `mean_sqr`."""
    stop: float = 0.0
    """Flag: the process has received SIGTERM."""
    suspend: float = 0.0
    """Flag: the process has received SIGTSTP."""
    save: float = 0.0
    """Flag: the daemon has asked for a checkpoint, or the next one is due."""
    superseded: float = 0.0
    """Flag: a later run of the job has begun."""
    move_out: float = 0.0
    """Flag: the daemon or the node's agent has asked the job to move off its GPUs."""
    give_up: float = 0.0
    """Flag: the daemon has asked the run to give up nodes."""
    total_batch: float = 0.0
    """New total batch, in samples; 0: no change."""
    atomic_batch: float = 0.0
    """New atomic batch, in samples; 0: no change."""
    measure_every: float = 0.0
    """Steps from one measurement of the gradients to the next; 0: no change."""
    vote_every: float = 0.0
    """Steps from one vote to the next; 0: no change."""
    evaluating: float = 0.0
    """Flag: the process is in an evaluation (`Run.evaluating`)."""

    @property
    def urgent(self) -> bool:
        """Whether a run of one process acts on it at once."""
        return any((self.stop, self.suspend, self.save, self.superseded, self.move_out, self.give_up))


@dataclass(slots=True)
class _Pending:
    """A vote that is being added up."""

    vector: torch.Tensor
    handle: Any
    norms: PendingNorms | None


class Consensus:
    """Adds up the votes of all processes in the background.

    Args:
        group: all processes of the run.
    """

    def __init__(self, group: Group) -> None:
        self.stride = 1
        """Steps from one vote to the next."""
        self._group = group
        self._pending: _Pending | None = None

    def cast(self, vote: Vote, norms: PendingNorms | None) -> None:
        """Begin to add up the votes; all processes call it after the same step. `norms` is kept for `result`."""
        vector = torch.tensor(vote, dtype=torch.float64)
        self._pending = _Pending(vector, self._group.add_up(vector), norms)

    def result(self) -> tuple[Vote, PendingNorms | None] | None:
        """The sum of the votes cast last, and this process's norms with them. None: nothing was cast since the last
        call."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if pending.handle is not None:
            pending.handle.wait()
        return Vote(*pending.vector.tolist()), pending.norms


def stride_of(step_s: float) -> int:
    """Steps from one vote to the next if a step takes `step_s` seconds: a power of 2, so that it divides
    `COST_CHECKED_EVERY`."""
    fit = min(max(int(VOTE_EVERY_S / step_s), 1), LONGEST_STRIDE)
    return int(2 ** (fit.bit_length() - 1))
