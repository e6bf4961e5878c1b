"""A service of the tests' own: real store, real sockets, real HTTP; the cluster behind it is made up."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock_profiles.families import load_families
from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler.client import Client
from penstock_scheduler.disks import store_check
from penstock_scheduler.errors import BadJobSpec
from penstock_scheduler.health import HealthSettings, LoopHealth, StepName
from penstock_scheduler.limits import LimitSettings
from penstock_scheduler.messages import OutputFiles, Role, Submission, TokenOrder
from penstock_scheduler.model import ClusterState, Phase
from penstock_scheduler.models import SpecModels
from penstock_scheduler.plan_gate import Approval
from penstock_scheduler.policies import make_policy
from penstock_scheduler.ports import Fate, Unmanaged
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.rules import BudgetSettings, SchedulingRules
from penstock_scheduler.service.app import Controls, make_app
from penstock_scheduler.service.board import Board
from penstock_scheduler.service.server import Service
from penstock_scheduler.service.settings import ApiSettings
from penstock_scheduler.service.vitals import Vitals
from penstock_scheduler.store import open_store
from tests.scheduler.builders import job, on, snapshot

ME = getpass.getuser()


@dataclass
class MadeUp:
    """A submitter whose jobs are entries of a dictionary."""

    folder: Path
    jobs: dict[str, tuple[str, Submission]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    others: dict[str, Unmanaged] = field(default_factory=dict)
    held: dict[str, tuple[str, bool]] = field(default_factory=dict)
    ended: dict[str, Fate] = field(default_factory=dict)
    given_epoch: int | None = None
    forgotten: set[str] = field(default_factory=set)

    def submit(self, order: Submission, user: str, uid: int) -> str:
        number = str(1000 + len(self.jobs))
        self.jobs[number] = user, order
        return number

    def find(self, user: str, key: str) -> str | None:
        return next((name for name, (who, order) in self.jobs.items() if (who, order.key) == (user, key)), None)

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def hold(self, name: str, by: str, *, admin: bool) -> None:
        self.held[name] = by, admin

    def release(self, name: str, *, admin: bool) -> None:
        if name not in self.held:
            raise BadJobSpec("nobody holds it")
        if self.held[name][1] and not admin:
            raise BadJobSpec("an admin holds it")
        del self.held[name]

    def fates(self, jobs):
        return {name: self.ended.get(name) for name in jobs}

    def unmanaged(self, name: str) -> Unmanaged | None:
        return self.others.get(name)

    def output(self, name: str, user: str) -> OutputFiles | None:
        if name in self.forgotten:
            return None
        file = str(self.folder / f"{name}.out")
        return OutputFiles(stdout=file, stderr=file.replace(".out", ".err"), uid=self.folder.stat().st_uid)

    def epoch(self, name: str) -> int | None:
        return self.given_epoch


@dataclass
class Api:
    url: str
    socket: str
    board: Board
    submitter: MadeUp
    tokens: dict[str, str]
    changes: dict[str, object]
    app: object
    vitals: Vitals

    def client(self, who: str) -> Client:
        return Client(self.url, token=self.tokens[who])

    def look(self, *jobs, finished: dict[str, Fate] | None = None, gpu_seconds: object = None) -> None:
        self.submitter.ended.update(finished or {})
        self.board.take_state(ClusterState(snapshot("t4:2x4", []).nodes, jobs), time.time(), gpu_seconds or {})


ADAS = job("1", user="ada", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
BOBS = job("2", user="bob", max_gpus=2)


@contextmanager
def serving(folder: Path, prices: dict[str, float] | None = None, **settings: object) -> Iterator[Api]:
    """Job 1 is ada's and runs, job 2 is bob's and waits; ada, bob, oz (operator) and root have tokens."""
    store = open_store(folder / "state", writer=True)
    submitter = MadeUp(folder)
    board = Board(store, submitter)
    changes: dict[str, object] = {"paused": False, "policy": make_policy("sia")[1]}

    def set_policy(choice):
        changes["policy"] = make_policy(choice)[1]
        return changes["policy"]

    loop = LoopHealth(time.time)
    for step in StepName:
        with loop.step(step, 1):
            pass
    checks = [store_check(store, time.time)]
    checks[0].check()
    # No daemon ticks here, so nothing may count as late on a slow machine.
    vitals = Vitals(HealthSettings(late_s=3600.0), loop, checks, board, lambda: bool(changes["paused"]), lambda: 60.0)
    controls = Controls(
        lambda: changes["policy"],
        set_policy,
        lambda: bool(changes["paused"]),
        lambda paused: changes.update(paused=paused),
        lambda: {"daemon": {}},
        SchedulingRules(BudgetSettings(prices=prices or {}), LimitSettings(), store),
        lambda number, by: Approval(round=number, jobs=frozenset({"1"}), by=by, until_s=time.time() + 900),
        vitals.health,
    )
    models = SpecModels(load_families(None), 30.0)
    api_settings = ApiSettings.model_validate({"listen": "127.0.0.1:0", "socket": folder / "api.sock"} | settings)
    app = make_app(api_settings, board, controls, models, models.check)
    service = Service(api_settings, app, board)
    service.start()
    url = f"http://127.0.0.1:{service.port}"
    api = Api(url, f"unix:{api_settings.socket}", board, submitter, {}, changes, app, vitals)
    try:
        state = snapshot("t4:2x4", [ADAS, BOBS])
        policy, full = make_policy("sia")
        record = RoundRecord(state, full, policy.decide(state), {"decide": 0.1})
        store.save_round(record)
        board.record = record
        api.look(ADAS, BOBS)
        with Client(api.socket) as root:
            people: dict[str, Role] = {"ada": "user", "bob": "user", "oz": "operator", "boss": "admin"}
            for user, role in people.items():
                api.tokens[user] = root.create_token(TokenOrder(user=user, role=role)).token
            api.tokens["me"] = root.create_token(TokenOrder(user=ME)).token
            api.tokens["job 1"] = root.create_token(TokenOrder(user="ada", role="job", job="1")).token
            api.tokens["job 2"] = root.create_token(TokenOrder(user="bob", role="job", job="2")).token
        yield api
    finally:
        service.stop()
        store.close()


OBSERVED = {
    "kind": "observation",
    "gpu_type": "t4",
    "nodes": 1,
    "gpus": 2,
    "atomic_batch": 8,
    "steps": 5,
    "step_time_s": 0.5,
    "progress": 10.0,
}


def report(sequence: int = 0, epoch: int = 1, body: object = None) -> Report:
    body = body or Checkpointed(progress=1.0, seconds=0.1)
    return Report(job_id="1", epoch=epoch, sequence=sequence, time_s=1.0, body=body)
