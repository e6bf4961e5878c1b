"""Notices through a real mail server's dialogue and a real HTTP server."""

from __future__ import annotations

import dataclasses
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from email import message_from_string
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from penstock_loopback import wait_for
from penstock_profiles.wire import Checkpointed, Observation, Report
from penstock_scheduler.api.agent_messages import Contained, XidSeen
from penstock_scheduler.api.ports import SilentAgent
from penstock_scheduler.daemon import penstockd as daemon
from penstock_scheduler.daemon.notices import Notice, NoticeSettings, Notifier
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.model import CloudRun, ClusterState, EndedRun, Job, Offer, Phase, Stop, StopCode
from penstock_scheduler.model.records import GateRecord
from penstock_scheduler.people.errors import ConfigError, StoreError
from penstock_scheduler.rounds.plan_gate import NothingToApprove
from penstock_scheduler.rounds.settings import parse_settings
from penstock_scheduler.simulator import nodes_from_spec
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on


class Mailbox(socketserver.StreamRequestHandler):
    """Enough of SMTP (RFC 5321) to take a mail."""

    def handle(self) -> None:
        def say(text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        say("220 here")
        to: list[str] = []
        while line := self.rfile.readline().decode().strip():
            word = line.split(" ")[0].upper()
            if word == "RCPT":
                to.append(line.partition("<")[2].partition(">")[0])
            if word == "DATA":
                say("354 go on")
                body = []
                while (part := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                    body.append(part)
                self.server.mails.append((to, message_from_string("\n".join(body))))  # type: ignore[attr-defined]
            say({"QUIT": "221 bye"}.get(word, "250 ok"))
            if word == "QUIT":
                return


class Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked += 1  # type: ignore[attr-defined]
        good = server.asked > server.refuses  # type: ignore[attr-defined]
        if good:
            server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(204 if good else 503)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[socketserver.TCPServer, ThreadingHTTPServer]]:
    mail = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mailbox)
    mail.mails = []  # type: ignore[attr-defined]
    hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    hook.bodies, hook.asked, hook.refuses = [], 0, 0  # type: ignore[attr-defined]
    for server in (mail, hook):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield mail, hook
    for server in (mail, hook):
        server.shutdown()
        server.server_close()


def settings(servers, **fields: object) -> dict[str, object]:
    mail, hook = servers
    return {
        "smtp": f"127.0.0.1:{mail.server_address[1]}",
        "webhooks": [f"http://127.0.0.1:{hook.server_address[1]}/hook"],
        "mail_admins": ["ops@example.org"],
        "mail_domain": "example.org",
    } | fields


def test_notices_go_out_by_mail_and_webhook_and_a_name_adds_no_header(servers):
    mail, hook = servers
    notifier = Notifier(NoticeSettings.model_validate(settings(servers, kinds=["gpu-idle", "job-ended"])))
    notifier.tell(Notice("gpu-idle", "idle\r\nBcc: all@example.org", "Job 7 is idle.", "ada", {"job": "7"}))
    notifier.tell(Notice("job-ended", "over", "It is over.", "ada"))
    notifier.tell(Notice("budget", "not wanted", "Nobody asked for these."))
    notifier.stop()
    assert [to for to, _ in mail.mails] == [["ops@example.org", "ada@example.org"], ["ada@example.org"]]
    message = mail.mails[0][1]
    assert message["Subject"] == "[penstock] idle\\r\\nBcc: all@example.org"
    assert message["Bcc"] is None
    assert message.get_payload().strip() == "Job 7 is idle."
    assert [(body["kind"], body["facts"]) for body in hook.bodies] == [("gpu-idle", {"job": "7"}), ("job-ended", {})]


def test_a_notice_is_tried_again_and_a_dead_server_delays_no_other_notice(servers, caplog):
    mail, hook = servers
    hook.refuses = 2
    mail.shutdown()
    mail.server_close()
    notifier = Notifier(NoticeSettings.model_validate(settings(servers)), pauses_s=(0.0, 0.0, 0.0))
    notifier.tell(Notice("budget", "reached", "A budget is reached."))
    notifier.tell(Notice("budget", "the next", "Another one."))
    wait_for(lambda: len(hook.bodies) == 2, 120, "both to come")
    assert [body["subject"] for body in hook.bodies] == ["reached", "the next"]
    wait_for(lambda: caplog.text.count("notice not sent") == 2, 120, "the mails to be given up")
    notifier.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("webhooks = ['ftp://here']", "not an http or https URL"),
        ("smtp = 'here'", "smtp='here'.*line 2"),
        ("smtp_user = 'me'", "give both"),
        ("kinds = ['weather']", "kinds.*line 2"),
        ("gpu_idle_s = '5 min'", "in seconds.*line 2"),
    ],
)
def test_wrong_settings_of_notices_are_named(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_settings(f"[notices]\n{text}\n", "here")


@pytest.fixture
def site(servers, tmp_path, monkeypatch) -> Iterator[daemon.LiveScheduler]:
    """A simulated site of 4 T4 GPUs with a budget that is used up. It sends notices to the webhook."""
    _, hook = servers
    text = f"""
        [daemon]
        cluster = "simulated"
        state_dir = "{tmp_path}/state"
        [simulated]
        nodes = "t4:1x4"
        [budgets.site]
        hard_gpu_hours = 0.0
        [notices]
        webhooks = ["http://127.0.0.1:{hook.server_address[1]}/hook"]
        gpu_idle_s = 60.0
        """
    monkeypatch.setattr(NoticeSettings, "silent_s", 90.0)
    monkeypatch.setattr(NoticeSettings, "failing_s", 0.001)
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    store = open_store(tmp_path / "state", writer=True)
    site = daemon.make_site(path, parse_settings(text, str(path)), WallClock(), store)
    site.loop.tick()
    wait_for(lambda: "budget" in kinds(hook), 120, "the notice of the budget")
    yield site
    site.watcher.notifier.stop()
    store.close()


def run_job(site: daemon.LiveScheduler) -> Job:
    """Job 7 of ada runs on 2 GPUs."""
    running = job("7", user="ada", phase=Phase.RUNNING, allocation=on("t4", t4_00=2), started_s=time.time() - 99)
    site.board.observed(ClusterState(nodes_from_spec("t4:1x4"), (running,)), time.time())
    return running


def test_a_site_sends_notices_of_idle_gpus_and_of_a_silent_job(servers, site, monkeypatch):
    """The job trains, then its GPUs are idle for 61 s, then it is silent."""
    _, hook = servers
    began_s = time.time()
    run_job(site)
    site.watcher.check(site.loop.failing_s, site.loop.failure)
    assert site.board.silent(60.0, time.time() + 61) == [], "a job that never reported does not count as silent"
    now_s = began_s
    monkeypatch.setattr(time, "time", lambda: now_s)
    told = [[], [], [], [], [], ["gpu-idle"], [], ["job-silent"], []]
    said = [0.0, 0.0, 0.9, 0.0, 0.01, 0.0, 0.0, None, None]
    for now_s, (utilisation, expected) in zip(
        (began_s + passed for passed in (0, 40, 80, 120, 160, 181, 200, 291, 999)),
        zip(said, told, strict=True),
        strict=True,
    ):
        before = len(hook.bodies)
        if utilisation is not None:
            saved = observed(utilisation).model_copy(update={"body": Checkpointed(progress=1.0, seconds=1.0)})
            site.board.take_reports([observed(utilisation), saved])  # a checkpoint does not count as activity
        site.watcher.check(site.loop.failing_s, site.loop.failure)
        if expected:
            wait_for(lambda: len(hook.bodies) > before, 120, str(expected))  # noqa: B023 - called at once
        assert kinds(hook)[before:] == expected, now_s - began_s
    (idle,) = (body for body in hook.bodies if body["kind"] == "gpu-idle")
    assert (idle["user"], idle["facts"]) == ("ada", {"job": "7", "gpus": 2, "idle_s": 61.0})
    assert "2 t4 GPUs, which have done nothing for 61 s" in idle["text"]
    assert "2 t4 GPUs, and has reported nothing for 2 min" in hook.bodies[-1]["text"]


def test_a_site_sends_notices_of_ended_jobs_and_what_they_used(servers, site):
    """2 GPUs for 10 s."""
    _, hook = servers
    running = run_job(site)
    now_s = time.time()
    over = EndedRun("7", running.allocation, now_s, now_s + 10)
    state = ClusterState(nodes_from_spec("t4:1x4"), (), ended=(over,))
    site.board.observed(state, now_s + 10, {"7": {"t4": 20.0}})
    wait_for(lambda: "job-ended" in kinds(hook), 120, "the notice of a job's end")
    assert hook.bodies[-1]["facts"]["gpu_seconds"]["t4"] == pytest.approx(20.0, abs=0.1)
    assert [line.amount for line in site.board.store.ledger()] == [pytest.approx(20.0, abs=0.1)]


def test_a_site_sends_notices_of_contained_jobs_and_of_gpus_that_fail(servers, site):
    """An error that comes again within a day is not told again, and neither is 31, which is a program's fault."""
    _, hook = servers
    run_job(site)
    left = [
        Contained(number=1, job="7", time_s=1.0, cause="memory", text="job 7 held 9 MB: it was left.", killed=False)
    ]
    told_s = ((79, 1e9), (79, 1e9 + 60), (31, 1e9), (79, 1e9 + 90_000))
    xids = [("n0", XidSeen(number=number, time_s=at_s, device=3, xid=xid)) for number, (xid, at_s) in enumerate(told_s)]
    events = SimpleNamespace(
        take_contained=lambda: [left.pop()] if left else [],
        take_xids=lambda: [xids.pop(0)] if xids else [],
        silent=list,
    )
    site.watcher.node_events = events
    site.watcher.check(site.loop.failing_s, site.loop.failure)
    wait_for(lambda: "gpu-error" in kinds(hook), 120, "the notice of a GPU that fails")
    contained = next(body for body in hook.bodies if body["kind"] == "job-contained")
    assert (contained["user"], contained["text"]) == ("ada", "On GPUs that it shares, job 7 held 9 MB: it was left.")
    assert contained["facts"] == {"job": "7", "cause": "memory", "killed": False}
    assert contained["time_s"] == 1.0, "when it was, not when it is told"
    error = hook.bodies[-1]
    assert (error["user"], error["facts"]) == ("", {"node": "n0", "gpu": 3, "xid": 79})
    for _ in range(3):
        site.watcher.check(site.loop.failing_s, site.loop.failure)
    wait_for(lambda: kinds(hook).count("gpu-error") == 2, 120, "the notice of the next day")


def test_a_site_sends_a_notice_when_an_agent_falls_silent_and_when_it_is_back(servers, site):
    """Once, and again if it turns out that it has suspended a job."""
    _, hook = servers
    silent = []
    site.watcher.node_events = SimpleNamespace(take_contained=list, take_xids=list, silent=lambda: silent)

    def told(*jobs: str, away: bool = True) -> list[dict[str, object]]:
        silent[:] = [SilentAgent("n0", 1e9, jobs)] if away else []
        for _ in range(3):
            site.watcher.check(site.loop.failing_s, site.loop.failure)
        return [body for body in hook.bodies if body["kind"] == "agent-silent"]

    told()
    assert site.board.silent_agents == 1
    wait_for(lambda: len(told()) == 1, 120, "the notice that it is silent")
    wait_for(lambda: len(told("7")) == 2, 120, "the notice of its job")
    wait_for(lambda: len(told(away=False)) == 3, 120, "the notice that it is back")
    first, second, last = told(away=False)
    assert "The agent of n0 has not reported since" in first["text"]
    assert "systemctl status penstock-agent" in first["text"]
    assert second["facts"] == {"node": "n0", "since_s": 1e9, "suspended": ["7"]}
    assert "It has suspended 7, and only it resumes them" in second["text"]
    assert last["subject"] == "the agent of n0 is back"
    assert site.board.silent_agents == 0


def test_a_site_sends_one_notice_that_rounds_fail(servers, site, monkeypatch):
    _, hook = servers
    monkeypatch.setattr(site.board, "observed", failing)
    looks = iter([False, False, True])
    site.loop.run(lambda: next(looks), lambda: time.sleep(0.05))
    site.watcher.check(site.loop.failing_s, site.loop.failure)
    site.watcher.check(site.loop.failing_s, site.loop.failure)
    wait_for(lambda: "protected" in kinds(hook), 120, "the notice of failing rounds")
    site.watcher.notifier.stop()
    assert kinds(hook).count("protected") == 1


def test_a_site_sends_a_notice_before_a_disk_is_full_when_it_is_and_when_it_has_room_again(servers, site):
    for problem, warning in (("", ""), ("", "9 GiB free"), ("", "8 GiB free"), ("No space", "8 GiB free"), ("", "")):
        site.watcher.check_disk("store", problem, warning)
    wait_for(lambda: kinds(servers[1]).count("disk") >= 3, 120, "the notices of the disk")
    site.watcher.notifier.stop()
    told = [(each["facts"]["state"], each["text"]) for each in servers[1].bodies if each["kind"] == "disk"]
    assert told == [
        ("warning", "9 GiB free. Running jobs continue."),
        ("problem", "No space. Running jobs continue."),
        ("ok", "The disk of the store has room again."),
    ]


def test_a_site_sends_a_notice_when_the_cloud_stops_launching_and_when_it_launches_again(servers, site):
    _, hook = servers
    for protected in ("", "EC2 refuses to end i-1: no permission", "EC2 refuses to end i-1: no permission", ""):
        site.watcher.check_cloud(protected)
    wait_for(lambda: kinds(hook).count("protected") >= 2, 120, "both notices arrive")
    site.watcher.notifier.stop()
    texts = [body["text"] for body in hook.bodies if body["kind"] == "protected"]
    assert len(texts) == 2, "each once"
    assert "EC2 refuses to end i-1" in texts[0]
    assert "penstock cloud resume" in texts[0]


def test_an_admin_is_told_once_of_what_the_cloud_needs(servers, site):
    _, hook = servers
    old = "in us-east-1, on-demand prices of g5.xlarge are as of 2025-06-30: too old to be used"
    for troubles in ((), (old,), (old, "another"), (), (old,)):
        site.watcher.check_cloud_troubles(troubles)
    wait_for(lambda: kinds(hook).count("cloud-trouble") >= 3, 120, "the notices arrive")
    site.watcher.notifier.stop()
    texts = [body["text"] for body in hook.bodies if body["kind"] == "cloud-trouble"]
    assert texts == [f"I{old[1:]}.", "Another.", f"I{old[1:]}."]


def test_the_user_of_a_job_that_is_stopped_in_the_cloud_is_told_once(servers, site):
    _, hook = servers
    run = CloudRun("7", Offer("vm", "t4", 1, 1, 1.0), 100.0, 5.0, user="ann", stopped="the $5.00 are spent")
    for runs in ((), (run,), (run,), (), (dataclasses.replace(run, since_s=200.0),)):
        site.watcher.check_cloud_stops(runs)
    wait_for(lambda: kinds(hook).count("cloud-stop") >= 2, 120, "a notice for each of two runs")
    site.watcher.notifier.stop()
    told = [body for body in hook.bodies if body["kind"] == "cloud-stop"]
    assert len(told) == 2
    assert {body["user"] for body in told} == {"ann"}
    assert "Job 7 was stopped in the cloud, on 1 t4 (vm, $1.00/h): the $5.00 are spent" in told[0]["text"]


def test_a_site_tells_of_a_refused_plan_once_notes_every_stop_and_takes_an_approval(servers, site):
    _, hook = servers
    first = site.store.last_round()
    stop = Stop(StopCode.GAIN, "faster")
    refused = GateRecord(refused=("it stops 9 running jobs",), stops={"7": stop})
    for number, gate, lost in (
        (2, refused, ""),
        (3, refused, ""),
        (4, GateRecord(), "2 jobs"),
        (5, GateRecord(), "2 jobs"),
    ):
        snapshot = dataclasses.replace(first.snapshot, round=number, time_s=time.time(), no_gain=lost)
        plan = dataclasses.replace(first.plan, round=number, stops={} if gate.refused else {"7": stop})
        record = dataclasses.replace(first, snapshot=snapshot, plan=plan, gate=gate)
        site.store.save_round(record)
        site.watcher.decided(record)
    wait_for(lambda: "plan-refused" in kinds(hook), 120, "the notice of a refused plan")
    approval = site.approve(3, "root")
    assert (approval.jobs, site.loop.gate.approval) == ({"7"}, approval)
    assert site.store.control("approval")["by"] == "root", "it outlives a restart"
    with pytest.raises(NothingToApprove, match="round 4 was not refused"):
        site.approve(4, "root")
    site.watcher.notifier.stop()
    told, lost = (body for body in hook.bodies if body["kind"] == "plan-refused")
    assert (lost["subject"], "2 jobs" in lost["text"]) == ("no job is moved for a gain", True)
    assert "penstock plan --approve 2" in told["text"]
    noted = [(line.action, line.target, line.allowed) for line in site.store.audit()]
    assert noted == [("stop", "jobs/7", True)] * 2 + [("refuse plan", "2", False)]


def observed(utilisation: float) -> Report:
    seen = Observation(
        gpu_type="t4", nodes=1, gpus=2, atomic_batch=8, steps=9, step_time_s=1.0, utilisation=utilisation, progress=1.0
    )
    return Report(job_id="7", epoch=1, sequence=0, time_s=1.0, body=seen)


def kinds(hook) -> list[str]:
    return [body["kind"] for body in hook.bodies]


def failing(*words: object) -> None:
    raise StoreError("the disk is full")
