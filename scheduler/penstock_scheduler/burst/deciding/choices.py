"""What a round may do with the cloud: which jobs may leave now, for which offer and how many dollars; and which come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock_scheduler.burst.deciding.estimates import Estimate, Gravity, estimate, lost_s
from penstock_scheduler.model import (
    Adaptivity,
    BudgetLine,
    Burst,
    CloudAssignment,
    CloudRun,
    CloudState,
    Configuration,
    Job,
    JobId,
    JobSpec,
    Offer,
    Phase,
    Reason,
    ReasonCode,
    Snapshot,
)
from penstock_scheduler.model.waiting import Ask, Wait
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.people.units import dollars, duration

NO_CLOUD = "burst=only, but this site has no cloud: leave burst out, or ask an admin to set [daemon] cloud"


def check_cloud(spec: JobSpec, *, has_cloud: bool) -> None:
    """Raises BadJobSpec for a job that runs in the cloud alone, on a site without one."""
    if spec.burst is Burst.ONLY and not has_cloud:
        raise BadJobSpec(NO_CLOUD)


@dataclass(frozen=True, slots=True)
class CloudChoice:
    """One way for a job to run in the cloud."""

    offer: Offer
    goodput: float
    """Goodput there, in the unit of the job's model."""
    usd: float
    """Dollars that are committed for it: the most that it may cost."""
    expected_usd: float
    data_usd: float = 0.0
    """The part of `usd` for the transfer of data."""

    @property
    def pays_s(self) -> float:
        """Seconds of the offer that the committed dollars pay for."""
        return self.usd / self.offer.usd_per_h * 3600


def may_leave(job: Job, cloud: CloudState) -> bool:
    """Whether the job's spec, or else the site, lets it run in the cloud.

    A job whose user named nodes or features stays on site: no instance has that name, and the features of none are known.
    """
    if job.nodes is not None and (job.nodes.only or job.nodes.features):
        return False
    if job.spec.burst is None:
        return cloud.by_default
    return job.spec.burst is not Burst.NEVER


def choices(snapshot: Snapshot) -> tuple[dict[JobId, list[CloudChoice]], dict[JobId, Reason]]:
    """For each queued job whose waiting budget is over: the ways to run in the cloud that budgets allow, the cheapest first.

    Also returns, for jobs that a budget keeps from leaving, the reason.
    """
    cloud = snapshot.cloud
    assert cloud is not None, "only a site with a cloud has choices"
    away = {run.job for run in cloud.runs}
    found: dict[JobId, list[CloudChoice]] = {}
    closed: dict[JobId, Reason] = {}
    for job in snapshot.jobs:
        if job.id in away or job.phase is not Phase.QUEUED or not may_leave(job, cloud):
            continue
        if snapshot.time_s < leaves_s(job, snapshot):
            continue
        options, why = choices_of(job, snapshot)
        if options:
            found[job.id] = options
        elif why is not None:
            closed[job.id] = why
    return found, closed


def choices_of(job: Job, snapshot: Snapshot) -> tuple[list[CloudChoice], Reason | None]:
    """The ways for one job to run in the cloud that budgets allow, the cheapest first, whether or not its wait is over.

    If there are none because of a budget, also the reason.
    """
    cloud = snapshot.cloud
    assert cloud is not None, "only a site with a cloud has choices"
    options = _options(job, snapshot, cloud)
    affordable = [option for option in options if _refuses(cloud.budgets, job.account, option) is None]
    if job.spec.burst_budget_usd is not None:
        affordable = [option for option in affordable if option.usd <= job.spec.burst_budget_usd]
    short = [option for option in affordable if cloud.longest_s is None or option.pays_s <= cloud.longest_s]
    if short:
        return short, None
    if affordable:
        return [], _too_long(affordable[0], cloud.longest_s or 0.0)
    return [], _closed(job, options[0], cloud.budgets) if options else None


def _closed(job: Job, cheapest: CloudChoice, budgets: Iterable[BudgetLine]) -> Reason:
    line = _refuses(budgets, job.account, cheapest)
    why = str(line) if line is not None else f"its own burst_budget_usd={dollars(job.spec.burst_budget_usd or 0.0)}"
    text = f"would leave for {cheapest.offer}, but {why} does not allow the {dollars(cheapest.usd)} that it may cost"
    return Reason(ReasonCode.CLOUD_BUDGET, text)


def _too_long(cheapest: CloudChoice, longest_s: float) -> Reason:
    hours = f"{cheapest.pays_s / 3600:.0f} h are to be committed, and runs there last {longest_s / 3600:.0f} h at most"
    return Reason(
        ReasonCode.CLOUD_BUDGET, f"would leave for {cheapest.offer}, but {hours}; declare a shorter --runtime"
    )


def _refuses(budgets: Iterable[BudgetLine], account: str, option: CloudChoice) -> BudgetLine | None:
    return next((line for line in budgets if needs_usd(line, account, option) > line.left_usd), None)


def needs_usd(line: BudgetLine, account: str, to: CloudChoice | CloudAssignment) -> float:
    """The most that a job of an account may cost of a budget, if it leaves now, US dollars."""
    return line.needs_usd(to.usd, to.offer.usd_per_h, to.data_usd) if line.covers(account) else 0.0


def within(
    budgets: Iterable[BudgetLine], taken: Mapping[JobId, tuple[str, CloudChoice | CloudAssignment]]
) -> list[BudgetLine]:
    """Budgets that these commitments (job -> account, destination) would break."""
    return [line for line in budgets if sum(needs_usd(line, *each) for each in taken.values()) > line.left_usd]


def leaves_s(job: Job, snapshot: Snapshot) -> float:
    """When the job's waiting budget is over, s since 1970. Only time in the queue counts."""
    cloud = snapshot.cloud
    assert cloud is not None, "only a site with a cloud lets jobs leave"
    if job.spec.burst is Burst.ONLY:
        return job.submit_s
    back_s = cloud.returned.get(job.id)
    wait_h = _wait_h(job, snapshot, cloud)
    since_s = cloud.waits_since_s.get(job.id)
    if since_s is None:
        since_s = max(job.submit_s, job.requeued_s or 0.0) if back_s is None else back_s
    return since_s + (wait_h or 0.0) * 3600


def leaves_at_once(job: Job, snapshot: Snapshot) -> bool:
    """Whether the job should run in the cloud even if GPUs are free on site: "no short jobs"."""
    cloud = snapshot.cloud
    assert cloud is not None, "only a site with a cloud lets jobs leave"
    return job.id not in cloud.returned and _wait_h(job, snapshot, cloud) is None


def _wait_h(job: Job, snapshot: Snapshot, cloud: CloudState) -> float | None:
    runtime_s = runtime(job, snapshot).runtime_s
    ask = Ask(job.spec.max_gpus, None if runtime_s is None else runtime_s / 3600)
    return cloud.waiting.wait_h(ask, returned=job.id in cloud.returned)


def runtime(job: Job, snapshot: Snapshot) -> Estimate:
    """How long the job will run on what it asks for, by the best known estimate."""
    cloud, goodput = snapshot.cloud, 0.0
    work = snapshot.facts[job.id].remaining_work
    if work is not None and job.spec.runtime_s is None:
        goodput = max((_goodput(snapshot, job, c) for c in _asked(job, snapshot)), default=0.0)
    history_s = cloud.history_s.get(job.id, ()) if cloud is not None else ()
    return estimate(
        user_s=job.spec.runtime_s,
        work=work,
        goodput=goodput,
        history_s=history_s,
        time_limit_s=job.time_limit_s,
    )


def _asked(job: Job, snapshot: Snapshot) -> set[Configuration]:
    """What the job asks for, on each of the site's GPU types, on as many whole nodes as necessary."""
    asked = set()
    for node in snapshot.nodes:
        if job.spec.allows_type(node.gpu_type) and node.gpus > 0:
            nodes = math.ceil(job.spec.max_gpus / node.gpus)
            gpus = job.spec.max_gpus if nodes == 1 else nodes * node.gpus
            asked.add(Configuration(nodes, gpus, node.gpu_type))
    return asked


def _goodput(snapshot: Snapshot, job: Job, configuration: Configuration) -> float:
    nodes, gpus = np.array([configuration.nodes]), np.array([configuration.gpus])
    value = float(snapshot.facts[job.id].model.goodput(configuration.gpu_type, nodes, gpus)[0])
    return value if math.isfinite(value) and value > 0 else 0.0


def _options(job: Job, snapshot: Snapshot, cloud: CloudState) -> list[CloudChoice]:
    """The offers that the job can use, the cheapest for its whole work first: by $/goodput, not by $/hour."""
    known = runtime(job, snapshot)
    work = snapshot.facts[job.id].remaining_work
    gravity = Gravity(cloud.bytes_per_s, cloud.usd_per_gb)
    data = float(job.spec.data_size_bytes or 0)
    here = max((_goodput(snapshot, job, c) for c in _asked(job, snapshot)), default=0.0)
    found = []
    for offer in cloud.offers:
        goodput = _goodput(snapshot, job, Configuration(offer.nodes, offer.gpus, offer.gpu_type))
        if offer.count < 1 or goodput <= 0 or not job.spec.allows(offer.gpu_type, offer.gpus, offer.nodes):
            continue
        if work is not None and job.spec.runtime_s is None:
            runs_s: float | None = work / goodput
        elif known.runtime_s is not None:
            runs_s = known.runtime_s * (here / goodput if here > 0 else 1.0)
        else:
            runs_s = None
        transfer_s = gravity.transfer_s(data)
        per_s, extra = offer.usd_per_h / 3600, gravity.usd(data)
        if runs_s is None:
            usd = expected = cloud.unknown_h * offer.usd_per_h + extra
        else:
            expected = (offer.boot_s + transfer_s + runs_s) * per_s + extra
            # The whole estimate and its margin are the job's own: a slow boot and the time to leave come on top.
            boot_s = max(offer.boot_s * (1 + cloud.margin), offer.latest_boot_s or 0.0)
            usd = (boot_s + (transfer_s + runs_s) * (1 + cloud.margin) + cloud.leave_s) * per_s + extra
        found.append(CloudChoice(offer, goodput, usd, expected, extra))
    return sorted(found, key=lambda choice: (choice.expected_usd, choice.offer.id))


def recalls(
    snapshot: Snapshot,
    idle: Mapping[str, int],
    *,
    queue_empty: bool,
    fits: Callable[[Job, str], bool] = lambda job, gpu_type: True,
) -> dict[JobId, Reason]:
    """Jobs in the cloud that should come back. A job that may not be stopped, or would lose all its work, never does.

    Nor does one while its nodes boot: Slurm before 23.02 keeps "TBD" as the addresses of such a job, cannot start it on site
    with them, and holds it ("launch failed requeued held").

    Args:
        snapshot: the round's snapshot.
        idle: GPU type -> GPUs on site that this round gives to no job.
        queue_empty: whether no job waits for GPUs on site.
        fits: whether a job finds nodes for at least its fewest GPUs of a type. Idle GPUs may lie on too many nodes.
    """
    cloud = snapshot.cloud
    assert cloud is not None, "nothing runs in a cloud that is not there"
    jobs = {job.id: job for job in snapshot.jobs}
    idle = dict(idle)
    for run in cloud.runs:
        job = jobs.get(run.job)
        if run.ending and job is not None and (where := _type_on_site(job, idle, fits)) is not None:
            idle[where] -= job.spec.min_gpus  # it is on its way back, to GPUs that are idle until it is there
    found: dict[JobId, Reason] = {}
    for run in sorted(cloud.runs, key=lambda run: (run.since_s, run.job)):
        job = jobs.get(run.job)
        if job is None or run.ending or run.trouble or run.state == "booting":
            continue
        if not (job.movable and snapshot.facts[job.id].saves):
            continue
        text = _must_come_back(job, run, cloud, snapshot.time_s - run.since_s)
        if text:
            found[run.job] = Reason(ReasonCode.RECALLED, text)
        elif (
            queue_empty
            and run.job not in cloud.returned  # once: else a job could go back and forth
            and (where := _pays(job, run, snapshot, idle, fits)) is not None
        ):
            idle[where] -= job.spec.min_gpus
            text = f"comes back: {job.spec.min_gpus} {where} are idle on site, and more is left to pay than a restart loses"
            found[run.job] = Reason(ReasonCode.RECALLED, text)
    return found


def _must_come_back(job: Job, run: CloudRun, cloud: CloudState, there_s: float) -> str:
    """Why a job may not stay in the cloud, whether or not the site has idle GPUs; empty: it may."""
    over = next(
        (line for line in cloud.budgets if line.covers(run.account) and line.left_usd <= 0 >= line.from_h), None
    )
    if over is not None and cloud.at_cap == "recall":
        return f"comes back: {over} is used up"
    first = cloud.waiting.kind is Wait.STAR and run.job not in cloud.returned and job.spec.burst is not Burst.ONLY
    if first and there_s > cloud.waiting.t_max_h * 3600:
        return (
            f"comes back after {there_s:.0f} s in the cloud: star-wait lets a first run take {cloud.waiting.t_max_h} h"
        )
    return ""


def _pays(
    job: Job, run: CloudRun, snapshot: Snapshot, idle: Mapping[str, int], fits: Callable[[Job, str], bool]
) -> str | None:
    """The GPU type on site on which the job would continue; None: coming back would lose more work than it still pays for."""
    spec = job.spec
    if spec.burst is Burst.ONLY:
        return None
    per_s = run.offer.usd_per_h / 3600
    there_s = max(snapshot.time_s - run.since_s - run.offer.boot_s, 0.0)
    # Adaptive jobs save a checkpoint when they are asked to.
    every_s = spec.checkpoint_every_s if spec.adaptivity is Adaptivity.RIGID else spec.checkpoint_every_s or 0.0
    lost = lost_s(there_s, every_s) + snapshot.facts[job.id].restart_cost_s
    left_s = run.usd / per_s - there_s
    work = snapshot.facts[job.id].remaining_work
    if work is not None:
        goodput = _goodput(snapshot, job, Configuration(run.offer.nodes, run.offer.gpus, run.offer.gpu_type))
        left_s = work / goodput if goodput > 0 else left_s
    if left_s <= lost:
        return None
    return _type_on_site(job, idle, fits)


def _type_on_site(job: Job, idle: Mapping[str, int], fits: Callable[[Job, str], bool]) -> str | None:
    """The first GPU type on site of which enough GPUs are idle for the job; None: there is none, or the job runs elsewhere."""
    spec = job.spec
    if spec.burst is Burst.ONLY:
        return None
    enough = (name for name, gpus in sorted(idle.items()) if spec.allows_type(name) and gpus >= spec.min_gpus)
    return next((name for name in enough if fits(job, name)), None)


@dataclass(frozen=True, slots=True)
class CloudForecast:
    """A job's way to the cloud, as of a round.

    Attributes:
        leaves_s: when its waiting budget is over, s since 1970.
        at_once: whether it leaves even if GPUs are free on site.
        offer: the cheapest offer for its whole work; None: there is none.
        expected_usd: what it is expected to cost there, US dollars.
        most_usd: what would be committed to it, and is the most that it may cost, US dollars.
        why: why no offer may be used; empty: the one above may.
    """

    leaves_s: float
    at_once: bool = False
    offer: Offer | None = None
    expected_usd: float = 0.0
    most_usd: float = 0.0
    why: str = ""

    def words(self, now_s: float) -> str:
        """The forecast as a sentence."""
        in_s = self.leaves_s - now_s
        when = "now" if self.at_once or in_s <= 0 else f"in {duration(in_s)}, unless it gets GPUs on site before"
        if self.offer is None:
            return f"It may leave for the cloud {when}, but {self.why}."
        cost = f"for about {dollars(self.expected_usd)}, at most {dollars(self.most_usd)}"
        return f"It may leave for the cloud {when}: the cheapest there is {self.offer}, {cost}."


def forecast(job: Job, snapshot: Snapshot) -> CloudForecast | None:
    """The forecast for a job that waits on site; None: it may not leave, or there is no cloud."""
    cloud = snapshot.cloud
    if cloud is None or not may_leave(job, cloud) or any(run.job == job.id for run in cloud.runs):
        return None
    options, closed = choices_of(job, snapshot)
    when_s, at_once = leaves_s(job, snapshot), leaves_at_once(job, snapshot)
    if options:
        return CloudForecast(when_s, at_once, options[0].offer, options[0].expected_usd, options[0].usd)
    return CloudForecast(when_s, at_once, why="no offer there suits it now" if closed is None else closed.text)
