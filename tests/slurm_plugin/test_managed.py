"""Jobs at rest: whatever happens, an observation shows what it would show if every job were looked at."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_profiles.wire import (
    Checkpointed,
    ControlMessage,
    Report,
    Request,
    Started,
    inbox_folder,
    reports_file,
    reports_folder,
)
from penstock_scheduler.model import ClusterState, Hold, Placement, Share, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import SlurmJob, SlurmNode, SlurmPartition, Unknown
from penstock_slurm.jobs.holds import HoldFiles
from penstock_slurm.observe import managed
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending

JOBS = 12
"""The second half of them are elements of an array."""


class World(Told):
    """A site with jobs, and two clusters on it, each with a spool of its own: one of them looks at every job each time."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.clock = SimulatedClock()
        self.silent = False
        self.max_time_s: float | None = None
        self.sequence = 0
        self.array_limits = {100: 2}
        self.spools, self.clusters = [], []
        for name in ("at-rest", "all"):
            spool = Spool(folder / name, alone=True)
            settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=spool.folder)
            self.spools.append(spool)
            self.clusters.append(SlurmCluster(self, self, spool, self.clock, settings, lambda spec: None))  # type: ignore[arg-type]
        for number in range(1, JOBS + 1):
            self.submit(number)

    def partitions(self) -> tuple[SlurmPartition, ...]:
        return tuple(dataclasses.replace(each, max_time_s=self.max_time_s) for each in super().partitions())

    def nodes(self) -> tuple[SlurmNode, ...]:
        first, *others = super().nodes()
        state = frozenset({"IDLE", "NOT_RESPONDING"}) if self.silent else first.state
        return (dataclasses.replace(first, state=state), *others)

    def release(self, job_id: str) -> None:
        del job_id

    def hold(self, job_id: str) -> None:
        del job_id

    def submit(self, number: int) -> None:
        now_s = self.clock.now_s()
        job = pending("gpu", id=str(number), number=number, submit_s=now_s, reason="JobHeldUser", restarts=0, uid=7)
        if number > JOBS // 2:
            job = dataclasses.replace(
                job, id=f"100_{number}", number=100 + number, array_job_id=100, array_task_id=number
            )
        self.listed = [each for each in self.listed if each.id != job.id] + [job]

    def throttle(self) -> None:
        self.array_limits = self.random.choice(({}, {100: 1}, {100: 2}, {100: 3}))

    def change(self, **fields: object) -> None:
        """Change Slurm's record of a job."""
        if self.listed:
            at = self.random.randrange(len(self.listed))
            self.listed[at] = dataclasses.replace(self.listed[at], **fields)  # type: ignore[arg-type]

    def some(self) -> SlurmJob | None:
        return self.random.choice(self.listed) if self.listed else None

    def tell(self, **fields: object) -> None:
        if (job := self.some()) is None:
            return
        for spool in self.spools:
            control = spool.control(job.id) or ControlMessage(job_id=job.id, epoch=1, round=1, submitted_s=job.submit_s)
            spool.tell(control.model_copy(update=fields))

    def report(self, body: Started | Checkpointed) -> None:
        if (job := self.some()) is None:
            return
        self.sequence += 1
        for spool in self.spools:
            control = spool.control(job.id)
            epoch = control.epoch if control is not None else 1
            reports_folder(spool.folder, job.id).mkdir(parents=True, exist_ok=True)
            report = Report(job_id=job.id, epoch=epoch, sequence=self.sequence, time_s=self.clock.now_s(), body=body)
            with reports_file(spool.folder, job.id, epoch).open("a", encoding="utf-8") as file:
                file.write(report.model_dump_json() + "\n")
            (inbox_folder(spool.folder) / job.id).touch()

    def ask(self, what: Callable[[HoldFiles, str], None]) -> None:
        if (job := self.some()) is not None:
            for spool in self.spools:
                what(HoldFiles(spool.folder), job.id)

    def run(self) -> None:
        start_s = self.clock.now_s() - self.random.choice((0.0, 1000.0))
        self.change(state="RUNNING", nodes=("n0",), required_nodes=("n0",), start_s=start_s, reason="None", priority=9)

    def flip(self) -> None:
        self.silent = not self.silent

    def end(self) -> None:
        if self.listed:
            self.listed.pop(self.random.randrange(len(self.listed)))

    def step(self) -> None:
        """Something happens."""
        now_s, number = self.clock.now_s(), self.random.randint(1, JOBS)
        again = {"state": "PENDING", "nodes": (), "required_nodes": (), "start_s": None, "priority": 0}
        request = Request(id="r", asked_s=now_s)
        things: list[Callable[[], object]] = [
            lambda: self.submit(number),
            self.throttle,
            self.end,
            self.run,
            self.run,
            lambda: self.change(**again, reason="JobHeldUser"),
            lambda: self.change(**again, restarts=self.random.randint(0, 3), reason="JobHeldUser"),
            lambda: self.change(**again, reason="JobHeldAdmin"),
            lambda: self.change(state="PENDING", priority=9, required_nodes=("n0",), nodes=(), start_s=None),
            lambda: self.change(state="COMPLETING", end_s=now_s),
            lambda: self.change(state="SUSPENDED", suspended_s=5.0, start_s=now_s, nodes=("n0",)),
            lambda: self.change(suspended_s=float(number)),
            lambda: self.change(eligible_s=now_s + self.random.choice((-5.0, 5.0, 100.0))),
            lambda: self.change(deadline_s=self.random.choice((None, now_s + 20.0))),
            lambda: self.change(dependency=self.random.choice(("", "afterok:1"))),
            lambda: self.change(admin_comment=self.random.choice(("", "somebody's", '{"penstock": {"max_gpus": 2}}'))),
            lambda: self.change(comment=self.random.choice(("", '{"penstock": {"max_gpus": 4}}'))),
            lambda: self.change(unknown=self.random.choice(((), (Unknown("Reason", "?"),)))),
            lambda: self.change(gpus_per_node=self.random.choice((None, 1, 2))),
            lambda: self.change(partition=(self.random.choice(("gpu", "debug", "other")),)),
            lambda: self.tell(request=self.random.choice((None, request))),
            lambda: self.tell(moved_s=self.random.choice((None, now_s))),
            lambda: self.tell(holds=self.random.choice((None, 0, 1, 3)), holding=self.random.choice((None, 0, 1))),
            lambda: self.tell(nodes=1, gpus=1, cpus=4, shares=self.random.random() < 0.5),
            lambda: self.tell(epoch=self.random.randint(1, 4)),
            lambda: self.report(Started(gpu_type="t4", gpu_ids={})),
            lambda: self.report(Checkpointed(request="r", progress=1.0, seconds=1.0)),
            lambda: self.ask(lambda files, job: files.hold(job, "ada", admin=False)),
            lambda: self.ask(lambda files, job: files.release(job)),
            self.flip,
            lambda: self.down.symmetric_difference_update({"gpu"}),
            lambda: setattr(self, "max_time_s", self.random.choice((None, 60.0, 1e6))),
            lambda: self.clock.sleep(self.random.choice((1.0, 10.0, 400.0))),
        ]
        self.random.choice(things)()
        self.clock.sleep(1.0)

    def observe(self) -> list[ClusterState]:
        """What both clusters show. Their jobs may come in another order."""
        at_rest, everything = self.clusters
        everything._managed._everything_s = -math.inf
        found = []
        for cluster in (at_rest, everything):
            state = cluster.observe()
            jobs, waiting = (
                sorted(state.jobs, key=lambda job: job.id),
                sorted(state.waiting, key=lambda each: each.job.id),
            )
            found.append(dataclasses.replace(state, jobs=tuple(jobs), waiting=tuple(waiting)))
            cluster.reports()
            actions = [Hold(job.id, 1) for job in jobs if job.id == "1"]
            cluster.apply(actions)
        return found


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_nothing_is_missed_of_jobs_at_rest(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(managed, "EVERYTHING_S", 1e9)  # or a minute would hide what is missed
    world = World(tmp_path, seed)
    rested = kept_back = 0
    for _ in range(50):
        for _ in range(world.random.choice((0, 1, 1, 1, 3))):
            world.step()
        at_rest, everything = world.observe()
        assert at_rest == everything
        one, other = (cluster._managed for cluster in world.clusters)
        assert one.remembered == other.remembered
        for name in ("records", "held", "not_yet", "unheard", "told", "gone", "listed"):
            assert getattr(one, name) == getattr(other, name), name
        rested += len(one.records) - len(one.looked)
        kept_back += len(one._kept_back)
    assert rested > 20, "there was something to miss"
    assert kept_back > 20, "elements had to wait for others of their array"


def test_a_move_is_forgotten_although_its_job_is_at_rest_otherwise(tmp_path: Path):
    """A round that would start the job again has it wait for GPUs, and the next round leaves it in the queue."""
    world = World(tmp_path, 0)
    cluster, spool = world.clusters[0], world.spools[0]
    world.listed = world.listed[:1]
    (job,) = world.listed
    control = ControlMessage(job_id=job.id, epoch=1, round=1, submitted_s=job.submit_s, holds=0)
    spool.tell(control.model_copy(update={"moved_s": world.clock.now_s()}))
    place = Placement("t4", "gpu", (Share("n0", 8),))
    for action in (Start(job.id, 1, place), Start(job.id, 1, place), None):
        cluster.observe()
        cluster.apply([] if action is None else [action])
    assert spool.control(job.id) == control
