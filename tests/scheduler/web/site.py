"""A made-up site to look at: nodes in every state, running and waiting jobs, a day of samples. It has no daemon and no Slurm."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_scheduler.api.history_messages import AllocationSpan, JobSample, QueueEntry
from penstock_scheduler.model import ClusterState, Job, LeaveCause, LeaveRequest, Node, Phase, Placement, Refusal, Share
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.model.snapshot import Snapshot
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import job, snapshot
from tests.scheduler.service.api import Api, serving

USERS = ("ada", "bob", "carol", "dan", "erin")
ACCOUNTS = ("vision", "speech", "theory")
NAMES = ("resnet50-imagenet", "bert-large", "gpt2-medium", "yolov5", "deepspeech2", "vit-base", "cifar-sweep")


@dataclasses.dataclass
class Site:
    """A site and what has been put into it."""

    api: Api
    nodes: tuple[Node, ...]
    running: list[Job]
    waiting: list[Job]
    refused: tuple[Refusal, ...] = ()

    def look(self) -> None:
        """Let the board see the jobs as they are now."""
        jobs = (*self.running, *self.waiting)
        self.api.board.observed(ClusterState(self.nodes, jobs, refused=self.refused), time.time(), {})
        if self.api.process.process is not None:
            self.api.publisher.publish()

    def start(self, name: str, placement: Placement) -> Job:
        """A job that waited gets GPUs."""
        old = next(each for each in self.waiting if each.id == name)
        new = dataclasses.replace(old, phase=Phase.RUNNING, allocation=placement, started_s=time.time())
        self.waiting.remove(old)
        self.running.append(new)
        store, now_s = self.api.board.store, time.time()
        entries = [entry for entry in store.waits() if entry.job == name]
        store.save_waits([], {(entry.job, entry.since_s): now_s for entry in entries})
        store.save_spans([span_of(new, now_s, cause="growth: more GPUs make it faster")])
        self.look()
        return new

    def end(self, name: str, code: str = "ended", text: str = "the job ended") -> None:
        """Its allocation span ends."""
        store = self.api.board.store
        spans = [each for each in store.open_spans() if each.job == name]
        ended = {"to_s": time.time(), "end": code, "end_text": text}
        store.save_spans([each.model_copy(update=ended) for each in spans])
        self.running = [each for each in self.running if each.id != name]

    def submit(self, new: Job, code: str = "waiting-capacity", text: str = "waits for free GPUs") -> None:
        """A job waits."""
        self.waiting.append(new)
        self.api.board.store.save_waits([wait_of(new, code, text)], {})
        self.look()


def span_of(each: Job, from_s: float, to_s: float | None = None, ids: bool = True, **more: object) -> AllocationSpan:
    """A span of what a job holds."""
    assert each.allocation is not None
    free: dict[str, int] = {}
    return AllocationSpan.model_validate(
        {
            "job": each.id, "user": each.user, "account": each.account, "gpu_type": each.allocation.gpu_type,
            "nodes": {share.node: share.gpus for share in each.allocation.shares},
            "gpu_ids": {share.node: tuple(range(free.get(share.node, 0), share.gpus)) for share in each.allocation.shares}
            if ids else None,
            "run_s": from_s, "restarts": each.restarts, "from_s": from_s, "to_s": to_s,
        } | more
    )  # fmt: skip


def wait_of(each: Job, code: str, text: str, since_s: float | None = None, **more: object) -> QueueEntry:
    """A span of waiting of a job."""
    return QueueEntry.model_validate(
        {
            "position": None, "job": each.id, "name": each.name, "user": each.user, "account": each.account,
            "partition": each.partitions[0], "submit_s": each.submit_s, "since_s": since_s or each.submit_s, "code": code,
            "text": text, "needs": "2 t4",
        } | more
    )  # fmt: skip


def fill(nodes: tuple[Node, ...], most: int, seed: int = 1) -> tuple[list[Job], dict[str, dict[str, tuple[int, ...]]]]:
    """Running jobs on these nodes, up to `most`, and the indices of their GPUs."""
    rng, now_s = random.Random(seed), time.time()
    jobs, ids = [], {}
    left = {node.name: list(range(node.gpus - node.gpus_others)) for node in nodes if node.may_start or node.leave}
    types: dict[str, list[Node]] = {}
    for node in nodes:
        if node.name in left:
            types.setdefault(node.gpu_type, []).append(node)
    for each in types.values():
        at = 0
        while at < len(each) and len(jobs) < most:
            wanted, shares, mine = rng.choice((1, 1, 2, 2, 4, 8, 16)), [], {}
            while wanted and at < len(each):
                node = each[at]
                count = min(wanted, len(left[node.name]))
                if count:
                    shares.append(Share(node.name, count))
                    mine[node.name] = tuple(left[node.name][:count])
                    left[node.name] = left[node.name][count:]
                    wanted -= count
                if not left[node.name] or rng.random() < 0.08:
                    at += 1
            if shares:
                name = str(1000 + len(jobs))
                user = rng.choice(USERS)
                jobs.append(
                    dataclasses.replace(
                        job(name, user=user, phase=Phase.RUNNING, account=rng.choice(ACCOUNTS)),
                        name=rng.choice(NAMES), submit_s=now_s - rng.uniform(3600, 90_000),
                        allocation=Placement(each[0].gpu_type, "all", tuple(shares)), restarts=rng.choice((0, 0, 1, 3)),
                    )
                )  # fmt: skip
                ids[name] = mine
    return jobs, ids


def in_states(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes in two racks of a type, with one in each state, and some GPUs held by plain jobs."""
    found = []
    for at, node in enumerate(nodes):
        changes: dict[str, object] = {"switch": f"leaf{at // 8}", "state": "IDLE"}
        if at % 17 == 5:
            changes |= {"may_start": False, "state": "DOWN"}
        elif at % 17 == 9:
            leave = LeaveRequest(LeaveCause.DRAIN, "drained for a new driver", None)
            changes |= {"may_start": False, "leave": leave, "state": "IDLE+DRAIN"}
        elif at % 17 == 12:
            changes |= {"reservation": "course"}
        elif at % 7 == 3:
            changes |= {"gpus_others": min(2, node.gpus)}
        found.append(dataclasses.replace(node, **changes))
    return tuple(found)


@contextmanager
def made_up(
    folder: Path, spec: str = "t4:6x4,a100:12x8,h100:4x8", running: int = 60, waiting: int = 30, **settings: object
) -> Iterator[Site]:
    """A site whose API serves; see `tests.scheduler.service.api.serving`."""
    rng, now_s = random.Random(2), time.time()
    nodes = in_states(nodes_from_spec(spec))
    jobs, ids = fill(nodes, running)
    queued = [
        dataclasses.replace(
            job(str(5000 + at), user=rng.choice(USERS), account=rng.choice(ACCOUNTS), submit_s=now_s - 60 * (waiting - at)),
            name=rng.choice(NAMES),
        )
        for at in range(waiting)
    ]  # fmt: skip
    refused = (Refusal("7001", "wrong", "bob", "max_gpus=0: give 1 or more"),)
    with serving(folder, **settings) as api:
        store = api.board.store
        site = Site(api, nodes, jobs, queued, refused)
        spans = [
            span_of(
                each, now_s - rng.uniform(600, 40_000), gpu_ids=ids[each.id], cause="capacity: free GPUs make it faster"
            )
            for each in jobs
        ]
        before = [
            span.model_copy(update={"job": f"9{span.job}", "from_s": span.from_s - 30_000, "run_s": span.from_s - 30_000,
            "to_s": span.from_s, "end": "ended", "end_text": "the job ended"})
            for span in spans
        ]  # fmt: skip
        shared = [each for each in jobs if each.allocation and each.allocation.gpus == 1][:1]
        spans += [
            span_of(each, now_s - 500, gpu_ids=ids[each.id], shared=True, job="8001", user="dan") for each in shared
        ]
        spans += [
            span_of(
                jobs[0], now_s - 900, job="8002", user="ada", nodes={"cloud-a100-1": 8}, gpu_ids=None, where="cloud"
            )
        ]
        store.save_spans([*spans, *before])
        codes = (
            ("waiting-capacity", "waits for free GPUs: 4 a100 are needed, 2 are free"),
            ("held", "is held by its user"),
        )
        store.save_waits(
            [
                wait_of(each, *codes[at % 9 == 4], estimated_start_s=now_s + 300 * at if at % 9 != 4 else None)
                for at, each in enumerate(queued)
            ]
            + [wait_of(job("7001", user="bob", submit_s=now_s), "refused", "max_gpus=0: give 1 or more")],
            {},
        )  # fmt: skip
        site.look()
        samples(site, now_s)
        saved = decide(site)
        api.board.record = saved
        site.look()
        yield site


def decide(site: Site) -> RoundRecord:
    """A round of these jobs, decided and saved."""
    few = (*site.running[:20], *site.waiting[:20])
    state: Snapshot = snapshot(site.nodes[:40], list(few), time_s=time.time())
    policy, full = make_policy("srtf")
    record = RoundRecord(dataclasses.replace(state, round=2), full, policy.decide(state), {"decide": 0.1})
    site.api.board.store.save_round(record)
    return record


def samples(site: Site, now_s: float) -> None:
    """A day of the cluster's figures, and the last hour of jobs'."""
    store, rng = site.api.board.store, random.Random(3)
    types = {node.gpu_type for node in site.nodes}
    for ago in range(1440, -1, -10):
        at, wave = int(now_s - 60 * ago), 0.5 + 0.4 * math.sin(ago / 120)
        figures = {
            "as-expected": 0.9 + 0.08 * wave,
            "busy": 0.55 + 0.3 * wave,
            "rounds.decided": 1.0,
            "rounds.decide_s": 0.2 + 0.3 * wave,
        }
        figures |= {
            "rounds.gap": 0.01 * wave,
            "rounds.stops": float(rng.randrange(3)),
            "jobs.queued": 30 * wave,
            "jobs.running": 60.0,
        }
        for gpu_type in types:
            total = sum(node.gpus for node in site.nodes if node.gpu_type == gpu_type)
            figures |= {
                f"gpus.{gpu_type}.all": total,
                f"gpus.{gpu_type}.allocated": total * wave,
                f"gpus.{gpu_type}.others": 2.0,
            }
        store.add_samples(at, [], figures)
    uses = {
        each.id: 0.0 if at % 11 == 3 else 0.35 + 0.6 * rng.random()
        for at, each in enumerate(site.running)
        if at % 5 != 4
    }
    for ago in range(60, -1, -2):
        reported = []
        for each in site.running:
            if each.id not in uses:
                continue
            gpus = each.allocation.gpus if each.allocation else 0
            goodput = 100.0 * gpus**0.9 * (0.9 + 0.1 * rng.random())
            sample = JobSample(
                time_s=now_s - 60 * ago, span_s=0, gpus=gpus, progress=1e6 - 6000 * ago * gpus, goodput=goodput,
                expected=100.0 * gpus**0.9, batch=256, utilisation=uses[each.id], memory_mb=9000,
            )  # fmt: skip
            reported.append((each.id, sample))
        store.add_samples(int(now_s - 60 * ago), reported, {})
