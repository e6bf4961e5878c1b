"""`penstock cloud doctor --live`: launches a few instances for a minute, and checks what penstockd relies on.

All that the tests pretend by moto is asked of the real account here: an order that is served once, gangs that are launched
whole, tags at launch, listings, and the end of instances. Each instance has the site's tag and a short longest life, so it ends
itself if this program dies; penstockd, too, ends what belongs to no run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

from penstock_cloud.doctor import CloudFinding
from penstock_scheduler.burst.manager.provider import DescribedInstance, Kind, LaunchFailed, Machine, Order, Provider
from penstock_scheduler.burst.manager.runs import LEAST_S, cost_usd

LIFE_S = 900.0
"""Longest life of an instance, s. It ends itself then."""

GONE_S = 300.0
"""How long to wait until the provider says that an instance is gone, s."""

NODES = (1, 2)
"""Nodes of the orders: a single instance, and a gang."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the checks of one place cost, US dollars.

    Attributes:
        machines: the kinds of instances that are launched: the cheapest of each market.
        expected_usd: if all goes well.
        most_usd: if nothing ends the instances before their longest life is over.
    """

    machines: tuple[Machine, ...]
    expected_usd: float
    most_usd: float


def cost(place: Provider, now_s: float) -> Cost:
    """What `check_live` will launch in a place, and for how much. Raises LaunchFailed."""
    offered = place.offers(now_s)
    markets = sorted({each.market for each in offered})
    machines = tuple(
        min((each for each in offered if each.market == market), key=lambda each: each.usd_per_h) for market in markets
    )
    if not machines:
        why = place.prices(now_s) or "nothing is offered"
        raise LaunchFailed(Kind.CONFIG, "", f"no price is known in {place.name}: {why}")
    usd_per_h = sum(NODES) * sum(each.usd_per_h for each in machines)
    return Cost(machines, cost_usd(LEAST_S, usd_per_h), cost_usd(LIFE_S, usd_per_h))


def check_live(
    place: Provider,
    machines: Sequence[Machine],
    now_s: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[CloudFinding]:
    """Launch and end an instance and a gang of each kind. All that was launched is ended, whatever fails.

    Args:
        place: the place, with a launch template or command as penstockd has it.
        machines: what to launch.
        now_s: the time, s since 1970.
        sleep: waits.
    """
    for machine in machines:
        for nodes in NODES:
            yield from _one_order(place, machine, nodes, now_s, sleep)


def _one_order(
    place: Provider, machine: Machine, nodes: int, now_s: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[CloudFinding]:
    run = f"doctor.{nodes}-{uuid4().hex}"
    what = f"{nodes} x {machine.line}"
    order = Order(
        run=run,
        token=run[-48:],
        instance_type=machine.instance_type,
        market=machine.market,
        nodes=tuple(f"penstock-doctor-{number}" for number in range(nodes)),
        tags={
            "run": run,
            "job": "doctor",
            "user": "",
            "account": "",
            "usd_per_h": repr(machine.usd_per_h),
            "lifetime_s": f"{LIFE_S:.0f}",
        },
        usd_per_h=machine.usd_per_h - machine.extras_usd_per_h,
        until_s=now_s() + LIFE_S,
    )
    try:
        yield from _launched(place, order, what, sleep)
    finally:
        ended = _end(place, run, what, now_s, sleep)
    yield ended


def _launched(place: Provider, order: Order, what: str, sleep: Callable[[float], None]) -> Iterator[CloudFinding]:
    try:
        launched = place.launch_gang(order)
    except LaunchFailed as error:
        if error.kind in (Kind.CAPACITY, Kind.QUOTA):
            remedy = "try again later" if error.kind is Kind.CAPACITY else "ask the provider to raise the quota"
        else:
            remedy = "give penstockd's role the policy that `penstock cloud policy` prints, or change [cloud]"
        yield CloudFinding(f"launch {what}", f"{error.kind}: {error}", remedy)
        return
    yield CloudFinding(f"launch {what}", ", ".join(sorted(launched.values())))
    report = "please report this as a bug: penstockd relies on it"
    try:
        again = place.launch_gang(order)
        same = again == launched
        text = "the same instances" if same else f"other instances: {', '.join(sorted(again.values()))}"
        yield CloudFinding(f"the same order again, {what}", text, "" if same else report)
        tagged = _listed(place, order.run, sleep)
        missing = sorted(set(launched.values()) - {each.id for each in tagged})
        text = "all have the tags site and run" if not missing else f"{', '.join(missing)} are not found by their tags"
        yield CloudFinding(f"tags at launch, {what}", text, report if missing else "")
    except LaunchFailed as error:
        yield CloudFinding(
            f"the launched {what}", str(error), "give penstockd's role the policy that `penstock cloud policy` prints"
        )


def _listed(place: Provider, run: str, sleep: Callable[[float], None]) -> list[DescribedInstance]:
    """The instances of a run. A listing may be some seconds late."""
    for _ in range(5):
        if found := place.list(run):
            return list(found)
        sleep(2.0)
    return []


def _end(
    place: Provider, run: str, what: str, now_s: Callable[[], float], sleep: Callable[[float], None]
) -> CloudFinding:
    """End all that a run has launched, until the provider says that it is gone."""
    check, until_s, trouble = f"end {what}", now_s() + GONE_S, ""
    alive: list[str] = []
    while True:
        try:
            alive = [each.id for each in place.list(run) if not each.gone]
            if not alive:
                place.tidy(run)
                return CloudFinding(check, "all are gone")
            place.terminate(alive)
            trouble = ""
        except LaunchFailed as error:
            trouble = f": {error}"
        if now_s() > until_s:
            names = ", ".join(alive) or f"what has the tag penstock:run={run}"
            text = f"{names} may still run and cost money{trouble}"
            return CloudFinding(
                check, text, "end them in the provider's console now; they end themselves within 15 minutes"
            )
        sleep(3.0)
