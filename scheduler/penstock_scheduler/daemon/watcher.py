"""Notices about the site: what its users and admins should know and no client asks for.

`Watcher.check` runs after each tick. It tells of GPUs that are idle or fail, of jobs that are silent or were contained, and of
rounds that fail. Budgets and ended jobs are told when they happen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from penstock_profiles.nvml import OF_PROGRAMS
from penstock_scheduler.api.ledger_messages import BudgetView
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.api.ports import NodeEvents, RoundListener
from penstock_scheduler.daemon.notices import Kind, Notice, Notifier
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.model import CloudRun, JobId, Stop
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.people.units import clock, duration
from penstock_scheduler.safety.health import RESUME
from penstock_scheduler.store.leadership.site_clock import site_time_s

log = logging.getLogger(__name__)

XID_AGAIN_S = 86_400.0
"""A repeated error of a GPU is told once in this time."""


class Watcher(RoundListener):
    """Tells each thing once, until it has changed."""

    def __init__(self, notifier: Notifier, board: Board, node_events: NodeEvents | None) -> None:
        self.notifier, self._board = notifier, board
        self.node_events = node_events
        self._told_of_failing = self._told_of_refusal = self._told_of_lost = False
        self._cloud_protected = ""
        self._cloud_troubles: tuple[str, ...] = ()
        """Why the cloud launches nothing, as last told."""
        self._cloud_stops: set[tuple[str, float]] = set()
        """Job and order of the stops in the cloud that were told and still go on."""
        self._xids_s: dict[tuple[str, int, int], float] = {}
        """Node, GPU, XID -> when it was last told, s since 1970."""
        self._silent: dict[str, tuple[str, ...]] = {}
        """Node with a silent agent -> its suspended jobs, as last told."""
        self._disks: dict[str, str] = {}
        """"store" or "spool" -> "problem", "warning" or "", as last told."""

    def check(self, failing_s: float | None, failure: str) -> None:
        """Tell what is new.

        Args:
            failing_s: for how long rounds have failed; None: they do not.
            failure: why.
        """
        wanted, now_s = self.notifier.settings, site_time_s()
        for view, idle_s in self._board.idle(wanted.gpu_idle_s):
            done = f"which have done nothing for {duration(idle_s)} according to NVML"
            self._tell_of_job(view, "gpu-idle", "{gpus} of job {job} are idle", done, {"idle_s": idle_s})
        for view, silent_s in self._board.silent(wanted.silent_s, now_s):
            done = f"and has reported nothing for {duration(silent_s)}"
            self._tell_of_job(view, "job-silent", "job {job} is silent", done, {"silent_s": silent_s})
        if self.node_events is not None:
            self._tell_of_contained(self.node_events)
            self._tell_of_xids(self.node_events)
            self._tell_of_silent_agents(self.node_events)
        self._tell_of_failing(failing_s, failure, wanted.failing_s)

    def check_cloud(self, protected: str) -> None:
        """Tell that the cloud has entered or left protected mode.

        Args:
            protected: why nothing more is launched; empty: it may be.
        """
        if protected == self._cloud_protected:
            return
        self._cloud_protected = protected
        subject = "the cloud is in protected mode" if protected else "the cloud launches again"
        text = (
            f"Nothing more is launched in the cloud: {protected}. Jobs that run there go on. {RESUME[0].upper()}{RESUME[1:]}."
            if protected
            else "Protected mode has ended."
        )
        self.notifier.tell(Notice("protected", subject, text, facts={"cloud": protected}))

    def check_cloud_troubles(self, troubles: tuple[str, ...]) -> None:
        """Tell what an admin must put right in the cloud, such as prices that are too old to be used, once for each.

        Args:
            troubles: all that there is now, each as a sentence with its remedy.
        """
        for trouble in troubles:
            if trouble not in self._cloud_troubles:
                text = f"{trouble[0].upper()}{trouble[1:]}."
                self.notifier.tell(Notice("cloud-trouble", "the cloud needs an admin", text))
        self._cloud_troubles = troubles

    def check_cloud_stops(self, stopped: Sequence[CloudRun]) -> None:
        """Tell each user whose job the cloud has stopped, once for each stop.

        Args:
            stopped: the runs whose job was stopped or is being stopped.
        """
        now = {(run.job, run.since_s) for run in stopped}
        for run in stopped:
            if (run.job, run.since_s) in self._cloud_stops:
                continue
            text = f"Job {run.job} was stopped in the cloud, on {run.offer}: {run.stopped}. It is queued again on site."
            facts = {"job": run.job, "why": run.stopped, "offer": run.offer.id}
            subject = f"job {run.job} was stopped in the cloud"
            self.notifier.tell(Notice("cloud-stop", subject, text, run.user, facts))
        self._cloud_stops = now

    def check_disk(self, what: str, problem: str, warning: str) -> None:
        """Tell that a disk has become full, will be full soon, or is good again.

        Args:
            what: whose disk: "store" or "spool".
            problem: why nothing can be written; empty: something can.
            warning: that it will be full soon; empty: it will not.
        """
        state = "problem" if problem else "warning" if warning else ""
        if state == self._disks.get(what, ""):
            return
        self._disks[what] = state
        subjects = {"problem": f"the {what} cannot be written", "warning": f"the disk of the {what} will be full soon"}
        text = (problem or warning or f"The disk of the {what} has room again.") + (
            ". Running jobs continue." if state else ""
        )
        facts = {"disk": what, "state": state or "ok"}
        subject = subjects.get(state, f"the disk of the {what} has room again")
        self.notifier.tell(Notice("disk", subject, text[0].upper() + text[1:], facts=facts))

    def decided(self, record: RoundRecord) -> None:
        """Note each stop in the audit log, and tell admins when the plan gate begins to refuse plans or moves."""
        number, refused = record.snapshot.round, record.gate.refused
        for job, stop in record.plan.stops.items():
            self._note("stop", f"jobs/{job}", f"round {number}: {stop.code.value}: {stop.text}", allowed=True)
        if refused and not self._told_of_refusal:
            why = "; ".join(refused)
            self._note("refuse plan", str(number), why, allowed=False)
            text = (
                f"The plan gate refused the plan of round {number}: {why}. Every running job keeps what it has, and jobs that "
                f"wait start where GPUs are free. See penstock plan; to let the plan pass: penstock plan --approve {number}"
            )
            facts = {"round": number, "jobs": sorted(record.gate.stops)}
            self.notifier.tell(Notice("plan-refused", f"the plan of round {number} was refused", text, facts=facts))
        self._told_of_refusal = bool(refused)
        lost = record.snapshot.no_gain
        if lost and not self._told_of_lost:
            text = f"Round {number}: {lost}. The jobs wait like others meanwhile. penstockd's log names them."
            self.notifier.tell(Notice("plan-refused", "no job is moved for a gain", text, facts={"round": number}))
        self._told_of_lost = bool(lost)

    def stopped(self, stops: Mapping[JobId, Stop]) -> None:
        """Note stops that no round decided in the audit log."""
        for job, stop in stops.items():
            self._note("stop", f"jobs/{job}", f"without a round: {stop.code.value}: {stop.text}", allowed=True)

    def _note(self, action: str, target: str, text: str, *, allowed: bool) -> None:
        try:
            self._board.store.note("", "admin", action, target, allowed=allowed, text=text)
        except StoreError as error:
            log.error("audit log", extra={"text": str(error)})

    def budget_reached(self, budget: BudgetView, limit: str) -> None:
        """A budget has reached its soft or hard limit."""
        owner = f"account {budget.account}" if budget.account else "the site"
        text = (
            f"The {limit} budget of {owner} for the {budget.period} is reached: {budget.used_gpu_hours:.1f} GPU-hours and "
            f"{budget.used_usd:.2f} USD are used. See penstock usage --ledger."
        )
        subject = f"{owner} has reached its {limit} budget"
        self.notifier.tell(Notice("budget", subject, text, facts=budget.model_dump(mode="json") | {"limit": limit}))

    def _tell_of_job(self, view: JobView, kind: Kind, subject: str, done: str, facts: dict[str, float]) -> None:
        """Tell of a job that holds GPUs and does not seem to use them."""
        assert view.allocation is not None, "it holds GPUs"
        gpus = f"{view.allocation.gpus} {view.allocation.gpu_type} GPUs"
        text = (
            f"Job {view.id} ({view.name}) of {view.user} holds {gpus}, {done}. "
            f"See penstock logs {view.id}; penstock cancel {view.id} ends it."
        )
        all_facts = {"job": view.id, "gpus": view.allocation.gpus} | facts
        self.notifier.tell(Notice(kind, subject.format(gpus=gpus, job=view.id), text, view.user, all_facts))

    def _tell_of_contained(self, events: NodeEvents) -> None:
        for contained in events.take_contained():
            view = self._board.job(contained.job)
            user = view.user if view is not None else ""
            subject = f"job {contained.job} {'was cancelled' if contained.killed else 'did not share as it must'}"
            text = f"On GPUs that it shares, {contained.text}"
            facts = contained.model_dump(mode="json", exclude={"text", "time_s", "number"})
            self.notifier.tell(Notice("job-contained", subject, text, user, facts, contained.time_s))

    def _tell_of_xids(self, events: NodeEvents) -> None:
        for node, seen in events.take_xids():
            error = node, seen.device, seen.xid
            if seen.xid in OF_PROGRAMS or seen.time_s - self._xids_s.get(error, -math.inf) < XID_AGAIN_S:
                continue
            self._xids_s[error] = seen.time_s
            text = (
                f"NVIDIA's driver on {node} has reported error XID {seen.xid} of GPU {seen.device}. See the kernel's log there "
                "(journalctl -k | grep NVRM), and NVIDIA's list of XIDs for what to do. Penstock goes on placing jobs there: "
                "drain the node if the GPU is broken."
            )
            facts = {"node": node, "gpu": seen.device, "xid": seen.xid}
            subject = f"GPU {seen.device} of {node} fails: XID {seen.xid}"
            self.notifier.tell(Notice("gpu-error", subject, text, facts=facts, time_s=seen.time_s))

    def _tell_of_silent_agents(self, events: NodeEvents) -> None:
        silent = {each.node: each for each in events.silent()}
        self._board.silent_agents = len(silent)
        for node in self._silent.keys() - silent.keys():
            self.notifier.tell(Notice("agent-silent", f"the agent of {node} is back", f"The agent of {node} reports."))
        for node, each in silent.items():
            if not set(each.suspended) - set(self._silent.get(node, ())) and node in self._silent:
                continue
            since = clock(each.since_s)
            jobs = ", ".join(each.suspended)
            text = (
                f"The agent of {node} has not reported since {since}, although the node responds to Slurm. "
                + (
                    f"It has suspended {jobs}, and only it resumes them in the first minutes of its silence. "
                    if jobs
                    else ""
                )
                + f"No job that shares GPUs starts there meanwhile. On {node}: systemctl status penstock-agent; "
                "journalctl -u penstock-agent."
            )
            log.warning("agent silent", extra={"node": node, "since": since, "suspended": jobs})
            facts = {"node": node, "since_s": each.since_s, "suspended": list(each.suspended)}
            self.notifier.tell(Notice("agent-silent", f"the agent of {node} is silent", text, facts=facts))
        self._silent = {node: each.suspended for node, each in silent.items()}

    def _tell_of_failing(self, failing_s: float | None, failure: str, patience_s: float) -> None:
        if failing_s is None:
            if self._told_of_failing:
                self.notifier.tell(Notice("protected", "rounds are decided again", "The daemon has recovered."))
            self._told_of_failing = False
        elif failing_s >= patience_s and not self._told_of_failing:
            self._told_of_failing = True
            text = f"For {duration(failing_s)} no round could be decided: {failure}. Running jobs go on running."
            self.notifier.tell(Notice("protected", "no round is decided", text, facts={"failing_s": failing_s}))
