"""The round loop of a running daemon, and what may change while it runs: policy, pause, settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock_profiles.wire import Report
from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.accounts.rules import BudgetSettings, SchedulingRules
from penstock_scheduler.api.ports import Agents, Burst, ClusterParts, Policy, Trigger
from penstock_scheduler.daemon.notices import Notice, NoticeSettings
from penstock_scheduler.daemon.service import vitals
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.samples import Sampler
from penstock_scheduler.daemon.service.vitals import Vitals
from penstock_scheduler.daemon.watcher import Watcher
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.sensitivities import Sensitivities
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError, NoStandby, StoreError
from penstock_scheduler.rounds.loop import RoundLoop
from penstock_scheduler.rounds.plan_gate import Approval, SafetySettings
from penstock_scheduler.rounds.policies import make_policy, sharing_parts
from penstock_scheduler.rounds.settings import DaemonSettings, Settings, load_settings
from penstock_scheduler.rounds.triggers import OnEvent, Period
from penstock_scheduler.safety.health import HealthSettings
from penstock_scheduler.store.backup import RESTORED
from penstock_scheduler.store.cloud_runs import OLDER_STORE
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

LIVE = (
    "daemon.rounds",
    "daemon.round_s",
    "daemon.tick_s",
    "policy.",
    "limits.",
    "budgets.",
    "notices.",
    "safety.",
    "health.",
)
"""Settings that change while the daemon runs: keys, or whole sections."""


@dataclass
class Handover:
    """Whether an admin wants another penstockd to lead."""

    wanted: bool = False
    successor: str = ""
    """Which one; empty: any."""
    hurry: Callable[[], None] = lambda: None
    """Called when it is wanted, so that the loop does not wait for its next tick."""


@dataclass(frozen=True)
class SiteModels:
    """The models of jobs."""

    specs: SpecModels
    sensitivities: Sensitivities
    kin: KinOfJobs
    """Lessons of ended jobs."""
    learned: LearnedModels
    """For the loop, in its thread."""
    sampler: Sampler

    def learn(self, reports: Sequence[Report]) -> None:
        """Take in reports of jobs."""
        self.learned.learn(reports)
        self.sampler.take_reports(reports)


@dataclass
class LiveScheduler:
    """The round loop on a cluster, and the settings that may change while it runs."""

    path: Path
    settings: Settings
    store: SqlStore
    parts: ClusterParts
    loop: RoundLoop
    rules: SchedulingRules
    board: Board
    watcher: Watcher
    vitals: Vitals
    models: SiteModels
    handover: Handover = field(default_factory=Handover)
    restored: bool = False
    """Whether the store was restored from a backup, or is older than the jobs, and the loop has not acted since."""

    @property
    def chosen(self) -> PolicyChoice:
        """The policy that decides, with all settings."""
        return self.loop.choice

    @property
    def paused(self) -> bool:
        """Whether an admin has paused the decisions."""
        return self.loop.paused

    @property
    def cloud(self) -> Burst | None:
        """The cloud, or None if the site has none."""
        return self.loop.cloud

    @property
    def kin(self) -> KinOfJobs:
        """Lessons of ended jobs."""
        return self.models.kin

    @property
    def store_place(self) -> str:
        """The store, for processes of their own: a URL or a folder."""
        daemon = self.settings.section(DaemonSettings)
        return daemon.store or str(daemon.state_dir.absolute())

    def settle(self) -> None:
        """Note in the store when the loop begins to settle, and when it acts again. To be called after each tick."""
        if (why := self.loop.settling) and not self.restored:
            self.store.set_control(OLDER_STORE, why)
            self.store.set_control(RESTORED, why)
            self.restored = True
        if self.restored and not self.loop.settling and self.loop.failing_s is None:
            self.store.set_control(RESTORED, None)
            self.restored = False
            log.info("rounds begin after the look")

    def set_policy(self, choice: PolicyChoice) -> PolicyChoice:
        """Decide by this policy from the next round on, also after a restart.

        Settings that the choice leaves out are those of the settings file.

        Returns:
            The choice with all settings.

        Raises:
            ConfigError: the policy cannot be made.
        """
        policy, full = make_decider(choice.over(self.settings.policies), self.parts.agents)
        self.store.set_control("policy", full.model_dump(mode="json"))
        self.loop.decide_by(policy, full)
        return full

    def restore_policy(self, choice: PolicyChoice) -> None:
        """Decide by the policy that an admin had set before the restart.

        If this version cannot make that policy, for example after an upgrade, the settings file decides, and the audit log and a
        notice tell: a daemon that refused to start would be worse.
        """
        try:
            self.set_policy(choice)
        except ConfigError as error:
            text = (
                f"the policy {choice} that an admin had set cannot be made any more: {error}. Rounds are decided by "
                f"{self.chosen}, as the settings file says; set the policy again with penstock policy set"
            )
            log.error("policy not restored", extra={"text": text})
            self._audit(allowed=False, text=text, action="restore policy")
            self.watcher.notifier.tell(
                Notice("protected", f"the policy {choice} is not in force", text[0].upper() + text[1:] + ".")
            )

    def approve(self, number: int, by: str) -> Approval:
        """Let plans stop the jobs that the refused plan of this round would have stopped; also after a restart.

        Raises:
            NothingToApprove: the round was not refused, or too long ago.
            StoreError: the store does not have the round, or is away.
        """
        approval = Approval.of(self.store.round(number), by, site_time_s())
        self.store.set_control("approval", approval.model_dump(mode="json"))
        if self.loop.gate is not None:
            self.loop.gate.approval = approval
        return approval

    def may_lead(self, successor: str) -> str:
        """Who may lead next if `successor` is asked for, for people. Empty: any that stands by.

        Raises:
            NoStandby: nobody could take over, or nobody of that name.
        """
        found = vitals.leading(self.store.leadership, None)
        if found.alone:
            raise NoStandby("the store is a file, so there is one penstockd; see docs/admin/high-availability.md")
        there = [each.name for each in found.standbys if each.seen_age_s <= vitals.LATE_S]
        if successor and successor not in there:
            raise NoStandby(f"{successor} does not stand by; these do: {', '.join(there) or 'none'}")
        if not there:
            raise NoStandby("no other penstockd stands by; start one first")
        return successor or ", ".join(there)

    def hand_over(self, successor: str) -> None:
        """Let another penstockd lead after the present tick: the one of this name; empty: any that stands by."""
        self.handover.successor, self.handover.wanted = successor, True
        self.handover.hurry()

    def set_paused(self, paused: bool) -> None:
        """Stop or resume deciding rounds, also after a restart."""
        self.store.set_control("paused", paused)
        self.loop.paused = paused

    def reload(self) -> None:
        """Read the settings file again. If it is wrong, all settings stay; the log and the audit log tell."""
        try:
            new = load_settings(self.path)
            daemon, limits = new.section(DaemonSettings), new.section(LimitSettings)
            safety = new.section(SafetySettings)
            budgets, notices = new.section(BudgetSettings), new.section(NoticeSettings)
            policy, full = make_decider(new.policy, self.parts.agents)
            changed, later = changes(self.settings, new)
            decides_anew = any(key.startswith("policy.") for key in changed)
            if decides_anew:
                self.store.set_control("policy", None)  # the file is newer than what an admin had set
        except (ConfigError, StoreError) as error:
            log.error("settings refused, the old ones stay", extra={"text": str(error)})
            self._audit(allowed=False, text=str(error))
            return
        if decides_anew:
            self.loop.decide_by(policy, full)
        if any(key in ("daemon.rounds", "daemon.round_s", "daemon.tick_s") for key in changed):
            self.loop.pace(make_trigger(daemon), daemon.tick_s)
        self.rules.use(budgets, limits)
        if self.loop.gate is not None:
            self.loop.gate.settings = safety
        self.watcher.notifier.settings = notices
        self.vitals.settings, self.vitals.round_s = new.section(HealthSettings), daemon.round_s
        self.settings = new
        log.info("settings reloaded", extra={"changed": ",".join(changed) or "nothing"})
        if later:
            log.warning("settings wait for a restart", extra={"text": ", ".join(later)})
        self._audit(
            allowed=True,
            text=f"changed: {', '.join(changed) or 'nothing'}; after a restart: {', '.join(later) or 'nothing'}",
        )

    def _audit(self, *, allowed: bool, text: str, action: str = "reload settings") -> None:
        try:
            self.store.note("", "admin", action, str(self.path), allowed=allowed, text=text)
        except StoreError as error:
            log.error("audit log", extra={"text": str(error)})


def changes(before: Settings, after: Settings) -> tuple[list[str], list[str]]:
    """Keys that differ, as `section.key`: those that apply at once, and those that need a restart."""
    old, new = before.in_full(), after.in_full()
    keys = {f"{name}.{key}" for tables in (old, new) for name, table in tables.items() for key in table}
    parted = [(key, *key.split(".", 1)) for key in sorted(keys)]
    differ = [key for key, name, rest in parted if old.get(name, {}).get(rest) != new.get(name, {}).get(rest)]
    live = [key for key in differ if key in LIVE or key.startswith(tuple(each for each in LIVE if each.endswith(".")))]
    return live, [key for key in differ if key not in live]


def make_decider(choice: PolicyChoice, agents: Agents | None) -> tuple[Policy, PolicyChoice]:
    """The policy, and the choice with all settings. Raises ConfigError, also if the cluster cannot do what the policy decides."""
    policy, full = make_policy(choice)
    sharing = sharing_parts(choice)
    if sharing and agents is None:
        raise ConfigError(
            f"policy {sharing[0]} needs agents: it lets jobs share GPUs, and no agents on the nodes of this cluster could do "
            "that. On Slurm, run penstock-agent on the nodes and set [slurm] agents = true (docs/admin/sharing.md), or choose "
            "a policy and stages without sharing, such as sia"
        )
    return policy, full


def make_trigger(daemon: DaemonSettings) -> Trigger:
    """When rounds are due."""
    return Period(daemon.round_s) if daemon.rounds == "period" else OnEvent(daemon.round_s)
