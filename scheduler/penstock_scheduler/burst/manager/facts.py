"""What is so of a run now: the facts that the table of `burst.states` asks for, each with its reason in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock_scheduler.burst.deciding.states import Fact
from penstock_scheduler.burst.manager.cluster_side import ClusterSide
from penstock_scheduler.burst.manager.instances import Instances
from penstock_scheduler.burst.manager.provider import Guests, Kind
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.burst.manager.share import SharedFolder
from penstock_scheduler.model import Job, Phase
from penstock_scheduler.people.units import dollars

ORDER_PATIENCE_S = 300.0
"""How long an order is repeated while the provider throttles or does not answer."""

LEAVE_PATIENCE_S = 180.0
"""How long a job may take to save and leave before its instance is ended."""

LEAVE_S = 120.0
"""How long before its committed dollars are spent a job is asked to save and leave."""

FETCH_S = 3600.0
"""How long the files of a detached run can be fetched after the end of its instance's longest life."""


@dataclass(frozen=True, slots=True)
class World:
    """The parts of the burst manager that facts are read from."""

    settings: BurstSettings
    cluster: ClusterSide
    instances: Instances
    guests: Guests
    share: SharedFolder
    recalled: Collection[str]
    """Runs that are to be recalled."""
    leaving_s: Mapping[str, float]
    """Run -> since when its job has been asked to leave."""
    tried_s: Mapping[str, float]
    """Run -> when its order was first placed. It may have waited for those of others."""


class Facts:
    """The facts of one run in one pass.

    Args:
        run: the run, with its instances as listed.
        job: its job; None: it has ended.
        now_s: now, s since 1970.
        tried: what the manager has found out by trying in this pass, such as a refusal.
    """

    def __init__(
        self, world: World, run: BurstRun, job: Job | None, now_s: float, tried: Mapping[Fact, str] | None = None
    ) -> None:
        self._world, self._run, self._job, self._now_s = world, run, job, now_s
        self._tried = tried or {}

    def why(self, fact: Fact) -> str:
        """Why this is so, as a part of a sentence; empty: it is not, or not known to be."""
        if fact in self._tried:
            return self._tried[fact]
        found: str = getattr(self, f"_{fact.name.lower()}", lambda: "")()
        return found

    # --- in any state

    def _suspended(self) -> str:
        return "Slurm has suspended its nodes" if self._world.cluster.suspended(self._run) else ""

    def _recalled(self) -> str:
        return "it was recalled" if self._run.id in self._world.recalled else ""

    def _job_gone(self) -> str:
        return "its job has ended" if self._job is None else ""

    def _elsewhere(self) -> str:
        assert self._job is not None, "a job that is gone runs nowhere"
        if self._run.state == "ordered":
            away = self._job.phase is not Phase.QUEUED and not self.at_nodes
        else:
            away = self._job.phase is Phase.RUNNING and not self.at_nodes
        return "its job runs elsewhere" if away else ""

    # --- ordered

    def _protected(self) -> str:
        why = self._world.instances.protected_in(self._run.region)
        return "" if why is None or self.at_nodes else f"nothing is launched in protected mode: {why}"

    def _unanswered(self) -> str:
        late = self._now_s - self._world.tried_s.get(self._run.id, self._now_s) >= ORDER_PATIENCE_S
        return f"{Kind.LOST}: {self._run.region} does not answer" if late and self.silent and not self.at_nodes else ""

    # --- booting

    def _instance_lost(self) -> str:
        lost = self.lost
        if lost is None or self._run.state == "booting":
            return "" if lost is None else f"instance {lost} ended before it joined Slurm"
        # Its cloud runner fetches the result, or the bucket does not answer. Nothing is paid for while links are valid.
        fetches = self._world.guests.on and self._world.guests.has(self._run.id, "result") is not False
        expires_s = self._run.expires_s
        if fetches and (expires_s is None or self._now_s < expires_s + FETCH_S):
            return ""
        return f"the cloud has taken instance {lost}"

    def _job_there(self) -> str:
        assert self._job is not None, "a job that is gone is nowhere"
        nodes = self._world.cluster.nodes
        up = all(name in nodes and nodes[name].up for name in self._run.nodes)
        if self._world.guests.on and up:  # a gateway is always up; a detached instance reports its start itself
            up = self.there("started")
        return "its job runs there" if self._job.phase is Phase.RUNNING and up and self.at_nodes else ""

    def _money_spent(self) -> str:
        expires_s = self._run.expires_s
        if expires_s is None or self._now_s < expires_s:
            return ""
        return f"the {dollars(self._run.usd)} committed to it were spent before it ran"

    def _never_asked(self) -> str:
        """The job's own fault or Slurm's: none of the image or the type is known."""
        if not self._boot_is_late or self._run.asked:
            return ""
        return f"Slurm did not start it: {self._world.cluster.reason(self._run.job) or 'it does not say why'}"

    def _input_late(self) -> str:
        """The input is still on its way, which is no fault of the image or the type."""
        if not self._boot_is_late or self._world.guests.has(self._run.id, "input") is not False:
            return ""
        return f"its input had not arrived within {self._boot_s:.0f} s; declare its size with --data-size"

    def _boot_late(self) -> str:
        late = "did not start on its input" if self._world.guests.on else "did not join Slurm"
        return f"it {late} within {self._boot_s:.0f} s" if self._boot_is_late else ""

    # --- running

    def _saved_and_taken(self) -> str:
        saved = self.lost is not None and self._world.guests.has(self._run.id, "stopped")
        return f"the cloud has taken instance {self.lost}" if saved else ""

    def _requeued(self) -> str:
        assert self._job is not None, "a job that is gone is in no queue"
        waiting = self.lost is None and self._job.phase in (Phase.QUEUED, Phase.STARTING)
        return "Slurm has put its job back into the queue" if waiting else ""

    def _money_nearly_spent(self) -> str:
        expires_s = self._run.expires_s
        if self.lost is not None or expires_s is None:
            return ""
        soon = self._now_s >= expires_s - min(LEAVE_S, self._run.lifetime_s / 2)
        return f"the {dollars(self._run.usd)} committed to it are spent" if soon else ""

    def _notice(self) -> str:
        if self.lost is not None:
            return ""
        if self.there("stopped"):
            return "the cloud takes its instance back within two minutes"
        told = self._world.share.notices(self._run.nodes)
        return f"the cloud takes {', '.join(told)} back within two minutes" if told else ""

    # --- leaving

    def _has_left(self) -> str:
        since_s = self._world.leaving_s.get(self._run.id, self._now_s)
        guests = self._world.guests
        ended = self.money_over or self.lost is not None
        nothing_comes = ended and (not guests.on or guests.handed_back(self._run.id) is False)
        left = self._job is None or self._job.phase is Phase.QUEUED
        return (
            (self._run.why or "its job has left")
            if left or nothing_comes or self._now_s - since_s > LEAVE_PATIENCE_S
            else ""
        )

    # --- what they are made of

    @property
    def at_nodes(self) -> bool:
        """Whether the job holds, or is about to hold, nodes of the run. With a store that was restored from a backup, the
        record of such a run may say that nothing has been launched yet."""
        job = self._job
        if job is None or job.allocation is None:
            return False
        return {share.node for share in job.allocation.shares} <= set(self._run.nodes)

    @property
    def lost(self) -> str | None:
        """An instance of the run that has ended; None: none has."""
        return next((slot.instance for slot in self._run.slots if slot.ended_s is not None), None)

    @property
    def silent(self) -> bool:
        """Whether the run's place has lost an answer in this pass."""
        return self._run.region in self._world.instances.silent

    @property
    def money_over(self) -> bool:
        """Whether the committed dollars are spent."""
        return self._run.expires_s is not None and self._now_s >= self._run.expires_s

    def there(self, what: str) -> bool:
        """Whether a detached run has written this, as far as is known now. The bucket is asked as often as the provider."""
        return self._world.instances.seen is not None and self._world.guests.has(self._run.id, what) is True

    @property
    def _boot_s(self) -> float:
        """How long the boot may take, s."""
        return self._world.settings.boot_timeout_s + self._run.data_s

    @property
    def _boot_is_late(self) -> bool:
        since_s = self._run.ordered_s if self._run.there_s is None else self._run.there_s
        return self._now_s - since_s > self._boot_s
