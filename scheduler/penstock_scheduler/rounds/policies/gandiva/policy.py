"""The policy `gandiva`: one round, step by step. The package's documentation explains the algorithm."""

from __future__ import annotations

from penstock_scheduler.model import Plan, Snapshot
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva.growth import grow, shrink
from penstock_scheduler.rounds.policies.gandiva.landing import land
from penstock_scheduler.rounds.policies.gandiva.migration import migrate
from penstock_scheduler.rounds.policies.gandiva.packing import pack, undo_packs
from penstock_scheduler.rounds.policies.gandiva.reasons import plan_of
from penstock_scheduler.rounds.policies.gandiva.settings import GandivaSettings
from penstock_scheduler.rounds.policies.gandiva.state import RoundState


class Gandiva:
    """Time slices, packing and migration, by what is measured while jobs run.

    From one round to the next it keeps only the jobs' requests.
    """

    name = "gandiva"
    shares = True

    def __init__(self, settings: GandivaSettings) -> None:
        self._settings = settings
        self._requests = common.Requests()

    def decide(self, snapshot: Snapshot) -> Plan:
        """One round."""
        state = RoundState(self._settings, snapshot, self._requests.of(snapshot))
        introspective = self._settings.mode == "introspective" and snapshot.sharing is not None
        if introspective:
            undo_packs(state)
        for shared in state.nodes.values():
            shrink(state, shared, 0)
        land(state, introspective=introspective)
        if introspective:
            migrate(state)
            pack(state)
        grow(state)
        return plan_of(state)
