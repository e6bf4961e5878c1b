"""A service of the tests' own: real store, real sockets, real HTTP; the cluster behind it is made up."""

from __future__ import annotations

import getpass
import json
import os
import pwd
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import httpx

from penstock_loopback import wait_for
from penstock_loopback.machine import free_ports
from penstock_profiles.families import load_families
from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.accounts.rules import BudgetSettings, SchedulingRules
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import OutputFiles, Role, Submission
from penstock_scheduler.api.ports import Fate, Owned, Unmanaged
from penstock_scheduler.daemon.service.app import make_app
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.forwarding import PublishFirst
from penstock_scheduler.daemon.service.port import Chosen
from penstock_scheduler.daemon.service.publisher import Publisher
from penstock_scheduler.daemon.service.server import Service, let_read
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.daemon.service.vitals import Vitals
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import ClusterState, Phase
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import BadJobSpec, NoSuchRun
from penstock_scheduler.rounds.plan_gate import Approval
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import parse_settings
from penstock_scheduler.safety.health import HealthSettings, LoopHealth, StepName
from penstock_scheduler.store.disks import store_check
from penstock_scheduler.store.sql import open_store
from tests.constants import with_constants
from tests.forking import FORKING
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
    owners: dict[str, Owned] = field(default_factory=dict)
    """Whose jobs there are, besides those that were submitted."""
    cancelled_as: list[str | None] = field(default_factory=list)

    def submit(self, order: Submission, user: str, uid: int) -> str:
        number = str(1000 + len(self.jobs))
        self.jobs[number] = user, order
        return number

    def find(self, user: str, key: str) -> str | None:
        return next((name for name, (who, order) in self.jobs.items() if (who, order.key) == (user, key)), None)

    def owned(self, name: str) -> Owned | None:
        if name in self.jobs and name not in self.owners:
            return Owned(self.jobs[name][0], pwd.getpwnam(self.jobs[name][0]).pw_uid, 0, 0.0)
        return self.owners.get(name)

    def cancel(self, name: str, user: str | None) -> None:
        self.cancelled.append(name)
        self.cancelled_as.append(user)

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
    process: ApiProcess
    """Runs if the API is separate."""
    publisher: Publisher
    service: Service

    def client(self, who: str) -> Client:
        return Client(self.url, token=self.tokens[who])

    def look(self, *jobs, finished: dict[str, Fate] | None = None, gpu_seconds: object = None) -> None:
        self.submitter.ended.update(finished or {})
        self.submitter.owners |= {each.id: Owned(each.user, 0, each.restarts, each.submit_s) for each in jobs}
        self.board.observed(ClusterState(snapshot("t4:2x4", []).nodes, jobs), time.time(), gpu_seconds or {})
        if self.process.process is not None:
            self.publisher.publish()
            if self.tokens:
                self.catch_up()

    def catch_up(self) -> None:
        """Until penstock-api knows what was published: it reads that at the end of each order."""
        with self.client("ada") as ada:
            ada.renew("1")


ADAS = job("1", user="ada", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
BOBS = job("2", user="bob", max_gpus=2)


def penstock_api(
    config: Path, files: tuple[int, int] | None = None, user: str | None = None, deadline_s: float | None = None
) -> None:
    """What `penstock-api --config CONFIG` does, in a process of its own; its log is beside the settings."""
    from penstock_scheduler.daemon.service import limits
    from penstock_scheduler.daemon.service.process import main

    if deadline_s is not None:
        limits.HEAD_S = limits.BODY_S = deadline_s

    if user is not None:
        account = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    with config.with_suffix(".log").open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(["--config", str(config)]))


def toml(value: object) -> str:
    """A value in TOML; a dictionary is an inline table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


class ApiProcess:
    """penstock-api, with the settings of a penstockd."""

    def __init__(self, folder: Path, settings: dict[str, object], state: Path | str, name: str = "api") -> None:
        self.config = folder / f"{name}.toml"
        self.settings = {"embedded": False} | settings
        self.state = state
        self.files: tuple[int, int] | None = None
        """Its limits on open files, soft and hard; None: those of the tests."""
        self.user: str | None = None
        """The user that it runs as; None: that of the tests."""
        self.deadline_s: float | None = None
        """Of headers, bodies and handshakes; None: the program's own."""
        self.process: BaseProcess | None = None

    def start(self) -> None:
        """Start it, and wait until it serves."""
        where = "state_dir" if isinstance(self.state, Path) else "store"
        tables = {"api": self.settings, "daemon": {where: str(self.state)}}
        self.config.write_text(
            "".join(
                f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
                for name, table in tables.items()
            )
        )
        before = self._started()
        self.process = FORKING.Process(target=penstock_api, args=(self.config, self.files, self.user, self.deadline_s))
        self.process.start()
        wait_for(lambda: self._started() > before, 120, "penstock-api to start", details=lambda: self.log)

    @property
    def log(self) -> str:
        """What it has logged."""
        path = self.config.with_suffix(".log")
        return path.read_text() if path.exists() else "no log"

    def _started(self) -> int:
        return self.log.count("event=started")

    def kill(self) -> None:
        """End it with -9."""
        assert self.process is not None
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """End it as systemd would."""
        if self.process is not None and self.process.is_alive():
            self.process.terminate()
            self.process.join(60)
            if self.process.exitcode is None:
                self.kill()
            assert self.process.exitcode == 0, self.log


class MadeUpCloud:
    """A cloud in protected mode, with one run whose record cannot be read."""

    def __init__(self) -> None:
        self._reasons, self._unreadable = ("no permission",), {"7.1": "7"}
        self._was, self._images = "cluster c1 of head1", ("ami-2 in us-east-1",)

    def end_protection(self) -> tuple[str, ...]:
        reasons, self._reasons = self._reasons, ()
        return reasons

    def adopt(self) -> str:
        was, self._was = self._was, ""
        return was

    def accept_images(self) -> tuple[str, ...]:
        images, self._images = self._images, ()
        return images

    def forget(self, run: str) -> str:
        if run not in self._unreadable:
            raise NoSuchRun(f"{run} is no open run with an unreadable record")
        return self._unreadable.pop(run)


class Resting:
    """A loop that ticks and finds all well, and rests while it is paused."""

    incomplete = cloud_protected = ""
    cloud_troubles: tuple[str, ...] = ()

    def __init__(self, changes: dict[str, object]) -> None:
        self._changes = changes
        self.health = LoopHealth(time.time)
        for step in StepName:
            with self.health.step(step, 1):
                pass

    @property
    def at_rest(self) -> bool:
        return bool(self._changes["paused"])


class MadeUpControls:
    """Controls that only note what is changed, and the health of a loop that ticks."""

    def __init__(self, board: Board, changes: dict[str, object], prices: dict[str, float], models: SpecModels) -> None:
        self.changes, self._board = changes, board
        self.settings = parse_settings("", "text")
        self.rules = SchedulingRules(BudgetSettings(prices=prices), LimitSettings(), board.store)
        checks = [store_check(board.store, time.time)]
        checks[0].check()
        # No daemon ticks here, so nothing may count as late on a slow machine.
        self.vitals = Vitals(with_constants(HealthSettings, {"late_s": 3600.0}), 60.0, Resting(changes), checks, board)
        self.cloud: Any = MadeUpCloud()
        self.kin = KinOfJobs(board.store, models.beginning, recalls=False)
        self.store_place = str(board.store.file.parent if board.store.file is not None else "")

    @property
    def chosen(self) -> PolicyChoice:
        return cast(PolicyChoice, self.changes["policy"])

    def set_policy(self, choice: PolicyChoice) -> PolicyChoice:
        self.changes["policy"] = make_policy(choice)[1]
        return self.chosen

    @property
    def paused(self) -> bool:
        return bool(self.changes["paused"])

    def set_paused(self, paused: bool) -> None:
        self.changes["paused"] = paused

    def approve(self, number: int, by: str) -> Approval:
        return Approval(round=number, jobs=frozenset({"1"}), by=by, until_s=time.time() + 900)

    def may_lead(self, successor: str) -> str:
        return successor or "b"

    def hand_over(self, successor: str) -> None:
        self.changes["moved_after"] = self._board.store.audit(limit=1)[0].action


@contextmanager
def serving(
    folder: Path,
    prices: dict[str, float] | None = None,
    *,
    separate: bool = False,
    at: str | None = None,
    **settings: object,
) -> Iterator[Api]:
    """Job 1 is ada's and runs, job 2 is bob's and waits; ada, bob, oz (operator) and root have tokens.

    Args:
        separate: whether a penstock-api serves, to which this process is penstockd.
        at: URL of the store; None: a file.
    """
    where = at or folder / "state"
    store = open_store(where, writer=True)
    submitter = MadeUp(folder)
    board = Board(store, submitter)
    changes: dict[str, object] = {"paused": False, "policy": make_policy("sia")[1]}
    models = SpecModels(load_families(None), 30.0)
    controls = MadeUpControls(board, changes, prices or {}, models)
    vitals = controls.vitals
    api_settings = with_constants(ApiSettings, {"listen": "127.0.0.1:0", "socket": folder / "api.sock"} | settings)
    if separate:
        given = {
            "listen": settings.get("listen", f"127.0.0.1:{free_ports(1)}"),
            "private_socket": folder / "d.sock",
            "embedded": False,
        }
        api_settings = ApiSettings.model_validate(api_settings.model_dump(exclude_unset=True) | given)
    app = make_app(api_settings, board, controls, models, models.check)
    publisher = Publisher(board, lambda: Chosen.of(controls), lambda: app.state.api.gatekeeper.changes)
    if separate:
        app.add_middleware(PublishFirst, publish=publisher.publish)
        publisher.start()
    service = Service(api_settings, app, board, private=separate)
    service.start()
    process = ApiProcess(folder, api_settings.model_dump(mode="json", exclude_unset=True), where)
    if separate:
        let_read(store, api_settings)
        process.user = api_settings.user
        process.start()
    url = f"http://{api_settings.listen}" if separate else f"http://127.0.0.1:{service.port}"
    api = Api(
        url, f"unix:{api_settings.socket}", board, submitter, {}, changes, app, vitals, process, publisher, service
    )
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
        process.stop()
        service.stop()
        if separate:
            publisher.stop()
        store.close()


def log_in(api: Api, token: str) -> dict[str, str]:
    """Log in, and return the headers that a page in a browser sends afterwards."""
    answer = httpx.post(f"{api.url}/v1/session", json={"token": token})
    assert answer.status_code == 201, answer.text
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return {"Cookie": cookie, "X-CSRF-Token": answer.json()["csrf"]}


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
