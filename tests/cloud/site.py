"""A site in memory around the real `BurstManager` over EC2, called as by the real loop: jobs, cloud nodes, and a clock.

Slurm is modelled simply: a job starts on the nodes where it is sent once their instances run on moto, a held job is queued
again, and a node without an instance loses its jobs. The test with a real Slurm is in tests/cloud/test_slurm.py.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock_cloud.catalogue import Catalogue, shipped
from penstock_cloud.detached_runs import DetachedRuns
from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.ec2 import connect, connect_ssm
from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import StagingBucket
from penstock_cloud.templates import TAG
from penstock_loopback import wait_for
from penstock_scheduler.api.ports import CloudNode
from penstock_scheduler.burst.manager.manager import BurstManager
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.share import SharedFolder
from penstock_scheduler.burst.manager.worker import Yielding
from penstock_scheduler.model import (
    BurstJob,
    CloudAction,
    CloudState,
    Hold,
    Job,
    JobSpec,
    Outcome,
    Phase,
    Placement,
    Recall,
    Start,
)
from penstock_scheduler.model import Share as NodeShare
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2

TYPES = {"a10g": 2, "t4": 2}


Step = Callable[..., Any]


class Watched:
    """A part of the daemon whose lasting steps, the calls of the methods `lasting`, go through the site's `watch`."""

    def __init__(self, site: CloudSite, part: Any, lasting: Callable[[str], bool]) -> None:
        self._site, self._part, self._lasting = site, part, lasting

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._part, name)
        if name == "terminate_instances":
            real = self._site.noting_ends(real)
        return self._site.watch(name, real) if self._site.watch and self._lasting(name) else real


def there(ec2: Ec2, region: str) -> dict[str, Any]:
    """The settings of a further region of moto in which all that they name is there."""
    client = ec2.direct_in(region)
    return {
        "subnets": [client.describe_subnets()["Subnets"][0]["SubnetId"]],
        "security_groups": [client.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
        "image": client.register_image(Name="node", RootDeviceName="/dev/xvda", Architecture="x86_64")["ImageId"],
    }


class CloudSite:
    """See the module. It is the clock and the cloud nodes as well."""

    user = "ann"
    home = "cluster c1 of head1"
    staging: StagingBucket | None = None
    catalogue = staticmethod(shipped)
    prices: dict[str, float] = {}  # noqa: RUF012
    watch: Callable[[str, Step], Step] | None = None
    """Wraps each lasting step of the daemon: a write to the store, or an order to EC2 or Slurm. A crash removes it."""

    def __init__(
        self, settings: CloudSettings, store: SqlStore, ec2: Ec2, client: Any = None, *, background: bool = False
    ) -> None:
        self.background = background
        self.ended: set[str] = set()  # instances that this site has asked EC2 to end
        self.settings, self.store, self.ec2 = settings, store, ec2
        self.ahead_s = 0.0
        self.jobs: dict[str, Job] = {}
        self.on: dict[str, str] = {}  # node -> job that Slurm has sent there
        self.names = {f"{kind}-{number}": kind for kind, count in TYPES.items() for number in range(count)}
        self.refused: list[str] = []
        self.told: dict[str, str] = {}  # job -> what its user was told when it was refused
        self.boots = True
        self.starts = True
        self.round = 0
        self._client = client or connect(settings)  # half a second each; nothing of a daemon's memory is in it
        self.cloud = self.open()
        self.state = CloudState()
        self.outcomes: tuple[Outcome, ...] = ()

    def open(self) -> BurstManager:
        """The cloud of a daemon that has just started."""
        self.watch = None
        client: Any = Watched(self, self._client, lambda name: not name.startswith(("describe", "get")))
        store: Any = Watched(self, self.store, lambda name: name in ("save_cloud_run", "charge", "set_control"))
        nodes: Any = Watched(self, self, lambda name: name == "power_down")
        lock = threading.Lock() if self.background else None
        ec2 = client if lock is None else Yielding(client, lock)
        home = Region(ec2, self.settings, lambda: self.catalogue(), ssm=connect_ssm(self.settings), store=store)
        rng = random.Random(1)
        guests = None
        if self.staging is not None:
            guests = DetachedRuns(self.settings, SharedFolder(self.settings.share), self.staging)
        places = Places([home, *map(self._elsewhere, self.settings.regions)], self._elsewhere)
        return BurstManager(places, self.settings, store, self, nodes, rng, guests, lock)

    def _elsewhere(self, region: str) -> Region:
        """Another region: moto has them all behind one endpoint."""
        here = self.settings.in_region(region)
        return Region(connect(here), here, lambda: self.catalogue_of(region))

    def catalogue_of(self, region: str) -> Catalogue:
        """The catalogue of another region: as in this one, unless `prices` has a factor for it."""
        known, factor = self.catalogue(), self.prices.get(region, 1.0)
        types = {
            name: each.model_copy(update={"usd_per_h": (each.usd_per_h or 0) * factor})
            for name, each in known.types.items()
        }
        return known.model_copy(update={"types": types, "region": region})

    def client_of(self, region: str) -> None:
        """Let daemons that start from now on have this region as their own."""
        self._client = connect(self.settings.model_copy(update={"region": region}))

    def run_of(self, job: str) -> str:
        """Id of the job's newest run."""
        return self.store.cloud_runs(job=job)[-1].run

    def noting_ends(self, real: Step) -> Step:
        def terminate(InstanceIds: list[str]) -> Any:
            self.ended |= {*InstanceIds}
            return real(InstanceIds=InstanceIds)

        return terminate

    def owns(self, tags: dict[str, str]) -> bool:
        """Whether an instance with these tags was launched by this site. It may have lost the site's tag since."""
        runs = {line.key.split(":")[1] for line in self.store.cloud_ledger()}
        return tags.get(f"{TAG}site") == str(self.settings.site) or tags.get(f"{TAG}run") in runs

    # --- ports: Clock, CloudNodes

    def now_s(self) -> float:
        return time.time() + self.ahead_s

    def sleep(self, seconds: float) -> None:
        self.ahead_s += seconds

    @property
    def partition(self) -> str:
        return "burst"

    def cluster(self) -> str:
        return self.home

    def nodes(self) -> tuple[CloudNode, ...]:
        alive = self._alive() if self.on else set()
        return tuple(
            CloudNode(name, kind, 1, 4, 8000, free=name not in self.on, up=self.boots and name in alive)
            for name, kind in self.names.items()
        )

    def reason(self, job: str) -> str:
        return "" if self.starts else "AssocGrpBilling"

    def jobs_on_instances(self) -> dict[str, tuple[str, ...]]:
        return {job: tuple(name for name, its in self.on.items() if its == job) for job in set(self.on.values())}

    def job_of(self, number: str) -> str:
        return number

    def power_down(self, nodes: Sequence[str]) -> None:
        for name in nodes:
            if (job := self.on.pop(name, None)) is not None and job in self.jobs:
                self._queue(job)

    def refuse(self, job: str, text: str) -> None:
        self.refused.append(job)
        self.told[job] = text
        self._queue(job)

    # --- Slurm

    def submit(self, job: str, **spec: object) -> None:
        self.jobs[job] = Job(
            id=job,
            name="train",
            user=self.user,
            spec=JobSpec.model_validate({"runtime_s": 600.0} | spec),
            partitions=("gpu",),
            phase=Phase.QUEUED,
            submit_s=self.now_s(),
            account="physics",
        )

    def finish(self, job: str) -> None:
        del self.jobs[job]
        self.on = {name: other for name, other in self.on.items() if other != job}

    def run_on_site(self, job: str) -> None:
        """Start a queued job on a node of the site's own."""
        placement = Placement("t4", "gpu", (NodeShare("n1", 1),))
        self.jobs[job] = dataclasses.replace(self.jobs[job], phase=Phase.RUNNING, allocation=placement)

    def _queue(self, job: str) -> None:
        self.jobs[job] = dataclasses.replace(self.jobs[job], phase=Phase.QUEUED, allocation=None)
        self.on = {name: other for name, other in self.on.items() if other != job}

    def _start(self, job: str, placement: Placement) -> None:
        self.jobs[job] = dataclasses.replace(self.jobs[job], phase=Phase.RUNNING, allocation=placement)
        self.on |= dict.fromkeys(placement.nodes, job)

    def _alive(self) -> set[str]:
        """Nodes with instances that run by moto."""
        return {
            tag["Value"]
            for each in self.ec2.instances("running")
            for tag in each.get("Tags", [])
            if tag["Key"] == f"{TAG}node"
        }

    # --- the loop's side

    def tick(self, *actions: CloudAction) -> CloudState:
        """One tick, as in `RoundLoop.tick`. It advances the time by two seconds."""
        self.state = self.cloud.observe(tuple(self.jobs.values()))
        for asked in self.cloud.asks():
            if asked.job not in self.jobs:
                continue
            if isinstance(asked, Start) and self.starts:
                self._start(asked.job, asked.placement)
            elif isinstance(asked, Hold):
                self._queue(asked.job)
        self.outcomes = self.cloud.apply(actions)
        self.ahead_s += 2.0
        return self.state

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def send(self, job: str, offer: str = "g5.xlarge", usd: float = 5.0) -> None:
        """Do what a round does that sends the job to the cloud, with a tick before and after it."""
        self.tick()
        self.round += 1
        self.tick(self.order(job, offer, usd))
        self.tick()

    def order(self, job: str, offer: str = "g5.xlarge", usd: float = 5.0) -> BurstJob:
        """The action of a round that sends the job to the cloud."""
        return BurstJob(job, self.round, offer, usd)

    def recall(self, job: str) -> None:
        self.tick(Recall(job, self.round))

    def until(self, condition, most: int = 60) -> None:  # type: ignore[no-untyped-def]
        for _ in range(most):
            if condition():
                return
            self.tick()
        raise AssertionError(f"still not after {most} ticks: runs {self.state.runs}, words {self.state.words}")

    def really_until(self, condition: Callable[[], object], what: str) -> None:
        """Tick in real time, since the cloud's own thread does the work."""

        def now() -> object:
            self.tick()
            self.ahead_s -= 2.0
            return condition()

        wait_for(now, 120, what, details=lambda: f"{self.state.runs} {self.state.words} {self.state.closed}")

    @property
    def away(self) -> list[str]:
        return [run.job for run in self.state.runs]

    def running_in(self) -> list[tuple[str, str]]:
        """Region and job of each of the site's instances that run."""
        tags_of = [
            (each["Placement"]["AvailabilityZone"][:-1], {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])})
            for each in self.ec2.instances("pending", "running")
        ]
        return [(region, tags[f"{TAG}job"]) for region, tags in tags_of if self.owns(tags)]

    def crash(self) -> None:
        """kill -9, and a new daemon on the same store."""
        self.cloud = self.open()

    def bill(self) -> tuple[float, float]:
        """(what the ledger says was spent, what the site's instances on moto come to), US dollars, if all is over."""
        spent = sum(line.amount for line in self.store.cloud_ledger() if line.kind == "usd")
        owed = 0.0
        for each in self.ec2.instances():
            tags = {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])}
            if not self.owns(tags):
                continue
            price = float(tags[f"{TAG}usd_per_h"])
            ended = each["StateTransitionReason"].split("(")[1][:19]
            seconds = time.mktime(time.strptime(ended, "%Y-%m-%d %H:%M:%S")) - time.mktime(
                each["LaunchTime"].utctimetuple()
            )
            owed += max(seconds, 60.0) / 3600 * price
        return spent, owed
