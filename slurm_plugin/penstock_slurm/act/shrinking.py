"""Shrink in place: a run gives up whole nodes without a restart in Slurm, where this version of Slurm can do that.

A run that survives it loses the nodes at once. A run that `gives_up_nodes` leaves them first::

    asked (`Request.keep_nodes`) -> saves, leaves -> next run says so (`Started.left_nodes`) -> Slurm takes the nodes

Once the run has left nodes, Slurm takes them whatever a later plan says, because no process comes back to them. If the run
does not leave, it is moved by requeue. If Slurm does not take the nodes, the job starts again on what it holds or is to get.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from penstock_profiles.wire import ControlMessage, Request
from penstock_scheduler.model import JobId, Outcome, Placement, Progress, Resize, on_parts
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.steps import Scope
from penstock_slurm.gateway import ControllerAway, Refused, SlurmError, SlurmJob, SlurmReader, SlurmWriter, Transient
from penstock_slurm.gateway.abilities import Abilities, Ability
from penstock_slurm.jobs.messages import say
from penstock_slurm.observe.view import Spooled, left_behind

log = logging.getLogger(__name__)

Run = tuple[JobId, int]
"""A job, and the restarts of the run."""


def may_shrink(wanted: Placement, slurm: SlurmJob, scope: Scope) -> bool:
    """Whether a job's run can give up whole nodes and then has what is wanted. Its first node must stay.

    A run on parts of hosts cannot: it knows hosts only.
    """
    control, present, held = scope.spooled.control, scope.spooled.present, scope.job.allocation
    if control is None or present is None or held is None or slurm.state != "RUNNING" or scope.silent:
        return False
    if on_parts(slurm.nodes):
        return False
    if not (present.gives_up_nodes or (present.survives_losing_nodes and control.request is None)):
        return False
    kept = {(share.node, share.gpus) for share in wanted.shares}
    return kept < {(share.node, share.gpus) for share in held.shares} and slurm.nodes[0] in wanted.nodes


class Shrinking:
    """Shrinks runs, and remembers which attempts had no effect.

    Args:
        patience_s: how long a run may take to leave nodes.
    """

    def __init__(self, reader: SlurmReader, writer: SlurmWriter, spool: Spool, patience_s: float) -> None:
        self._writer, self._spool, self._patience_s = writer, spool, patience_s
        self._abilities = Abilities(spool.folder, reader.version, lambda: reader.features().accounting)
        self._tried: dict[Run, list[tuple[str, ...]]] = {}
        """Run -> its nodes at each attempt to shrink it."""
        self._since_s: dict[Run, float] = {}
        """Since when a run has left nodes that Slurm still counts."""
        self._stuck: dict[Run, tuple[str, ...]] = {}
        """Run that has left nodes which Slurm does not take -> all nodes that it holds."""

    def forget(self, matters: Callable[[JobId, int], bool]) -> None:
        """Forget all runs but these."""
        self._tried = {run: tries for run, tries in self._tried.items() if matters(*run)}
        self._since_s = {run: since_s for run, since_s in self._since_s.items() if matters(*run)}
        self._stuck = {run: nodes for run, nodes in self._stuck.items() if matters(*run)}

    def stuck(self, slurm: SlurmJob) -> bool:
        """Whether the job's run has left nodes that it still holds, so that it has to start again."""
        return slurm.state == "RUNNING" and self._stuck.get((slurm.id, slurm.restarts)) == slurm.nodes

    def shrink(self, action: Resize, scope: Scope) -> Outcome | None:
        """Take whole nodes from a run; None: the run has to be stopped. Raises ClusterAway."""
        slurm, control, present = scope.slurm, scope.spooled.control, scope.spooled.present
        if control is None or present is None or not may_shrink(action.placement, slurm, scope) or self.stuck(slurm):
            return None
        if left_behind(slurm, present):
            return Outcome(action, Progress.UNDER_WAY, "has left nodes, which Slurm takes now")
        tries = self._tried.get((slurm.id, slurm.restarts), [])
        ability: Ability = "shrink-again" if tries or present.left_nodes else "shrink"
        if slurm.nodes in tries or not self._may(ability):  # it was tried without effect
            return None
        if present.gives_up_nodes:
            return self._ask(action, scope, control)
        if self._take(ability, slurm, action.placement.nodes) is not None:
            return None
        self._spool.tell(_shrunk(control, action), slurm.uid)
        return Outcome(action, Progress.UNDER_WAY, "goes on and gives up whole nodes")

    def take_what_was_left(
        self,
        jobs: Mapping[JobId, SlurmJob],
        spooled: Callable[[SlurmJob], Spooled],
        silent: Collection[str],
        now_s: float,
    ) -> None:
        """Take from Slurm the nodes that these jobs' runs have left. Raises ClusterAway."""
        for slurm in jobs.values():
            found, run = spooled(slurm), (slurm.id, slurm.restarts)
            control, present = found.control, found.present
            if control is None or present is None or self.stuck(slurm) or not set(silent).isdisjoint(slurm.nodes):
                continue
            left = left_behind(slurm, present)
            if not left:
                continue
            kept = tuple(node for node in slurm.nodes if node not in left)
            ability: Ability = "shrink-again" if set(present.left_nodes) - set(left) else "shrink"
            why: SlurmError | str | None = f"its launchers did not end there within {self._patience_s:.0f} s"
            may_try_again = True
            if self._spool.has_left(slurm.id, slurm.restarts, left):
                why = self._take(ability, slurm, kept)
                may_try_again = isinstance(why, Transient) and self._may(ability)
            if why is not None:
                if not may_try_again or now_s - self._since_s.setdefault(run, now_s) >= self._patience_s:
                    self._stuck[run] = slurm.nodes
                    say(self._writer, slurm, f"it gave up nodes {','.join(left)}, and has to restart: {why}")
                continue
            log.info("nodes taken in place", extra={"job": slurm.id, "nodes": ",".join(left)})
            asked = control.request if control.request is not None and not control.request.keep_nodes else None
            shape = {"nodes": len(kept), "gpus": len(kept) * (slurm.gpus_per_node or 0), "request": asked}
            self._spool.tell(control.model_copy(update=shape), slurm.uid)

    def _ask(self, action: Resize, scope: Scope, control: ControlMessage) -> Outcome | None:
        """Ask a run to leave nodes; None: it has not done so in time, or is being stopped."""
        request, wanted = control.request, action.placement.nodes
        left = ",".join(node for node in scope.slurm.nodes if node not in wanted)
        if request is not None and not request.keep_nodes:
            return None
        if request is None or request.keep_nodes != wanted:
            request = Request(id=f"{action.round}-{control.epoch}-keep", asked_s=scope.now_s, keep_nodes=wanted)
            self._spool.tell(control.model_copy(update={"request": request, "round": action.round}), scope.slurm.uid)
        elif not 0 <= scope.now_s - request.asked_s < self._patience_s:
            self._tried.setdefault((scope.slurm.id, scope.slurm.restarts), []).append(scope.slurm.nodes)
            text = f"it did not give up nodes {left} within {self._patience_s:.0f} s of the request, so it is restarted"
            say(self._writer, scope.slurm, text)
            return None
        return Outcome(action, Progress.UNDER_WAY, f"was asked to give up nodes {left}")

    def _may(self, ability: Ability) -> bool:
        """Whether this Slurm may be able to do it."""
        try:
            return self._abilities.may(ability)
        except ControllerAway as error:
            raise ClusterAway(str(error)) from error
        except SlurmError as error:
            log.info("cannot ask for Slurm's version", extra={"text": str(error)})
            return False

    def _take(self, ability: Ability, slurm: SlurmJob, kept: tuple[str, ...]) -> SlurmError | None:
        """Take all nodes but these from a job. Returns the error if that failed."""
        self._tried.setdefault((slurm.id, slurm.restarts), []).append(slurm.nodes)
        try:
            self._writer.shrink(slurm.id, kept)
            self._abilities.record(ability, True)
        except ControllerAway as error:
            raise ClusterAway(str(error)) from error
        except SlurmError as error:
            if isinstance(error, Refused | Transient):
                self._abilities.refused(ability, error)
            log.info("cannot shrink the job", extra={"job": slurm.id, "text": str(error)})
            return error
        return None


def _shrunk(control: ControlMessage, action: Resize) -> ControlMessage:
    """The control message of a run that has given up nodes."""
    wanted = action.placement
    shape = {"nodes": wanted.configuration.nodes, "gpus": wanted.gpus, "round": action.round}
    return control.model_copy(update=shape)
