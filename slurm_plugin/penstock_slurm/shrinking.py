"""Shrink in place: a run that survives it gives up whole nodes, where this version of Slurm can do that."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock_profiles.wire import ControlMessage
from penstock_scheduler.errors import ClusterAway
from penstock_scheduler.model import Job, JobId, Outcome, Placement, Progress, Resize
from penstock_scheduler.spool import Spool
from penstock_slurm.abilities import Abilities, Ability
from penstock_slurm.gateway import ControllerAway, Gateway, Refused, SlurmError, SlurmJob, Transient
from penstock_slurm.steps import Scope

log = logging.getLogger(__name__)


def may_shrink(wanted: Placement, slurm: SlurmJob, scope: Scope) -> bool:
    """Whether a job's run can give up whole nodes and then has what is wanted. Its first node must stay."""
    control, present, held = scope.spooled.control, scope.spooled.present, scope.job.allocation
    if control is None or control.request is not None or held is None or slurm.state != "RUNNING":
        return False
    if present is None or not present.survives_losing_nodes or scope.silent:
        return False
    kept = {(share.node, share.gpus) for share in wanted.shares}
    return kept < {(share.node, share.gpus) for share in held.shares} and slurm.nodes[0] in wanted.nodes


class Shrinking:
    """Shrinks runs, and remembers which attempts had no effect."""

    def __init__(self, gateway: Gateway, spool: Spool) -> None:
        self._gateway, self._spool = gateway, spool
        self._abilities = Abilities(spool.folder, gateway.version)
        self._tried: dict[tuple[JobId, int], list[tuple[str, ...]]] = {}
        """(job, restarts of the run) -> its nodes at each attempt to shrink it."""

    def forget(self, matters: Callable[[JobId, int], bool]) -> None:
        """Forget all runs but these."""
        self._tried = {run: tries for run, tries in self._tried.items() if matters(*run)}

    def shrink(self, action: Resize, scope: Scope) -> Outcome | None:
        """Take whole nodes from a run; None: the run has to be stopped. Raises ClusterAway."""
        slurm, job, control = scope.slurm, scope.job, scope.spooled.control
        if control is None or not may_shrink(action.placement, slurm, scope):
            return None
        tries = self._tried.setdefault((job.id, slurm.restarts), [])
        ability: Ability = "shrink-again" if tries else "shrink"
        if slurm.nodes in tries:  # it was tried without effect
            return None
        tries.append(slurm.nodes)
        if not self._try(ability, job, action.placement):
            return None
        self._spool.tell(_shrunk(control, action), slurm.uid)
        return Outcome(action, Progress.UNDER_WAY, "goes on and gives up whole nodes")

    def _try(self, ability: Ability, job: Job, wanted: Placement) -> bool:
        try:
            if not self._abilities.may(ability):
                return False
            self._gateway.shrink(job.id, wanted.nodes)
            self._abilities.record(ability, True)
        except (Refused, Transient) as error:
            self._abilities.refused(ability, error)
            return False
        except ControllerAway as error:
            raise ClusterAway(str(error)) from error
        except SlurmError as error:
            log.info("cannot shrink the job", extra={"job": job.id, "text": str(error)})
            return False
        return True


def _shrunk(control: ControlMessage, action: Resize) -> ControlMessage:
    """The control message of a run that has given up nodes."""
    wanted = action.placement
    shape = {"nodes": wanted.configuration.nodes, "gpus": wanted.gpus, "round": action.round}
    return control.model_copy(update=shape)
