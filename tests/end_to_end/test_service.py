"""The API over a real Slurm: submitting through real sbatch, the whole life of a job, and a daemon that is killed."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import sys
import threading
import time

import httpx
import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler.api.client import ApiError, Client, DaemonAway
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.cli import make_app
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(loopback, tmp_path):
    site = Site(loopback, tmp_path)
    site.start()
    yield site
    site.stop()
    loopback.reset()


def client(site: Site) -> Client:
    return Client(f"unix:{site.state / 'api.sock'}")


def trainer(site: Site, work_s: float) -> tuple[str, ...]:
    words = f"{shlex.quote(sys.executable)} -m penstock_executor.emulated --rates {shlex.quote(json.dumps(RATES))} "
    words += f"--work {work_s} --time-scale 1 --checkpoint-dir {site.folder}/checkpoints/api --start-seconds 0.1 "
    return tuple(shlex.split(words + "--save-seconds 0.1 --report-every 0.3"))


def order(site: Site, key: str, work_s: float, **more: object) -> Submission:
    import os

    spec = {"max_gpus": 2, "goodput_table": RATES, "checkpointable": True}
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    fields = {"command": trainer(site, work_s), "spec": spec, "output": f"{site.folder}/%j.out"} | more
    return Submission(key=key, environment=environment, partition="all", **fields)


def test_a_job_from_submission_to_its_end(site):
    site.wait_round()
    with client(site) as penstock:
        submitted = penstock.submit(order(site, "night-7", 8.0, name="night"))
        assert penstock.submit(order(site, "night-7", 8.0, name="night")).id == submitted.id
        comment = json.loads(site.job(submitted.id).comment)
        assert comment["penstock_key"] == "night-7"
        ended = penstock.wait(submitted.id, timeout_s=300)
        assert (ended.state, ended.ended, ended.exit_code) == ("ended", "COMPLETED", 0), site.tail()
        assert (ended.name, ended.key) == ("night", "night-7")
        wait_for(
            lambda: penstock.job(submitted.id).progress == pytest.approx(8.0), 120, "its last report", details=site.tail
        )
        assert penstock.log(submitted.id).ended
        assert "COMPLETED" in told(site, "show", submitted.id)
        assert f"Job {submitted.id}" not in told(site, "list", "--waiting")
        assert told(site, "logs", "--tail", "200", submitted.id) == penstock.log(submitted.id).text[-200:]
        assert told(site, "wait", submitted.id).strip().endswith("COMPLETED")
        assert submitted.id in told(site, "usage", "--ledger")
        assert "The job would get 2 " in told(site, "plan", "--dry-run", "--spec", '{"max_gpus": 2, "min_gpus": 2}')
        assert next(line.action for line in penstock.history(submitted.id).outcomes) == "start"
        assert penstock.ledger().lines[0].job == submitted.id
        other = penstock.submit(order(site, "long", 100_000.0))
        site.wait_states("RUNNING", other.id)
        (held,) = site.job(other.id).nodes
        wait_for(lambda: f"Job {other.id} runs" in told(site, "explain", other.id), 120, "the daemon to see it run")
        assert held in told(site, "drain", "node", held, "--why", "a fan")
        wait_for(lambda: moved_from(site, other.id, held), 120, f"the job to leave {held}", details=site.tail)
        assert "a fan" in told(site, "drain")
        told(site, "drain", "node", held, "--end")
        assert "is being cancelled" in told(site, "cancel", other.id)
        assert penstock.wait(other.id, timeout_s=120).ended == "CANCELLED"
        with pytest.raises(ApiError, match="partition") as error:
            penstock.submit(Submission(key="wrong", command=("true",), partition="nosuch"))
        assert error.value.code == "refused"
        for lines in ("#SBATCH --array=1-3\ntrue", "\n#SBATCH -N1 -a 1-3\ntrue"):
            with pytest.raises(ApiError, match="an array is several jobs"):
                penstock.submit(Submission(script=f"#!/bin/sh\n{lines}\n"))
        single = penstock.submit(Submission(script="#!/bin/sh\ntrue\n#SBATCH --array=1-3\n"))
        penstock.cancel(single.id)
        assert penstock.wait(single.id, timeout_s=120).state == "ended"


def told(site: Site, *words: str) -> str:
    """What the command `penstock` prints, asking the site's daemon."""
    said = CliRunner().invoke(make_app(), list(words), env={"PENSTOCK_URL": f"unix:{site.state / 'api.sock'}"})
    assert said.exit_code == 0, (words, said.output)
    return said.output


def moved_from(site: Site, job: str, node: str) -> bool:
    """Whether the job runs, and not on that node."""
    seen = site.job(job)
    return seen.state == "RUNNING" and node not in seen.nodes


def storm(site: Site, kills: int, seed: int, waiting: int) -> None:  # noqa: C901, PLR0915 (a story told in one piece)
    """Kill the daemon at random moments while jobs are submitted and report, and clients wait for events. Then count."""
    chance = random.Random(seed)
    site.wait_round()
    with client(site) as penstock:
        job = penstock.submit(Submission(key="target", command=("sleep", "600"), partition="all")).id
    acknowledged: set[int] = set()
    keys: dict[str, str] = {}
    stop = threading.Event()
    failures: list[str] = []

    def report() -> None:
        number = 0
        with client(site) as penstock:
            while not stop.is_set():
                body = Checkpointed(progress=1.0, seconds=0.1)
                each = Report(job_id=job, epoch=1000, sequence=number, time_s=time.time(), body=body)
                try:
                    receipt = penstock.report(job, [each])
                except (DaemonAway, ApiError):
                    time.sleep(0.05)
                    continue
                if receipt.refused:
                    failures.append(receipt.refused[0].message)
                    return
                acknowledged.add(number)
                number += 1

    def submit() -> None:
        number = 0
        with client(site) as penstock:
            while not stop.is_set():
                key = f"key-{number}"
                try:
                    found = penstock.submit(Submission(key=key, command=("true",), partition="all"))
                except PenstockError:
                    time.sleep(0.05)
                    continue
                keys[key] = found.id
                number += 1
                time.sleep(0.2)

    async def wait_for_news() -> int:
        """This many clients. Each has a request that waits for an event that never comes, and repeats it when it is cut off."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=waiting)
        transport = httpx.AsyncHTTPTransport(uds=str(site.state / "api.sock"), limits=limits)
        cut_off = 0

        async def one(http: httpx.AsyncClient) -> None:
            nonlocal cut_off
            while not stop.is_set():
                try:
                    answer = await http.get(f"/v1/jobs/{job}", params={"wait": 5, "since": 10**6})
                    if answer.status_code >= 500 and answer.status_code != 503:
                        failures.append(answer.text)
                except httpx.ConnectError:  # it is not up again
                    await asyncio.sleep(0.5)
                except httpx.TransportError:
                    cut_off += 1
                    await asyncio.sleep(0.5)

        async with httpx.AsyncClient(transport=transport, base_url="http://penstockd", timeout=120) as http:
            await asyncio.gather(*(one(http) for _ in range(waiting)))
        return cut_off

    cut_off: list[int] = []
    threads = [
        threading.Thread(target=report),
        threading.Thread(target=submit),
        threading.Thread(target=lambda: cut_off.append(asyncio.run(wait_for_news()))),
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(kills):
            if number % 2 == 0:  # otherwise, on a slow machine, no other request would be served
                known = len(keys)
                wait_for(lambda known=known: len(keys) > known or failures, 300, "a submission", details=site.tail)
            time.sleep(chance.uniform(0.5, 2.5))
            site.kill()
            site.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert not failures
    assert cut_off[0] >= kills / 2, "clients were waiting"
    assert len(acknowledged) > kills
    assert len(keys) > kills / 2
    with client(site) as penstock:
        for key, known in keys.items():
            assert penstock.submit(Submission(key=key, command=("true",), partition="all")).id == known
        last = penstock.submit(Submission(key="last", command=("sleep", "2"), partition="all")).id
        assert penstock.wait(last, timeout_s=120).ended == "COMPLETED", site.tail()
    # Slurm numbers its jobs, and forgets those that ended long ago. The last submission may have no answer yet.
    assert int(last) - int(job) - 1 - len(keys) in (0, 1), "each key was submitted once"
    wait_for(lambda: penstock_ready(site), 120, "the daemon to be ready", details=site.tail)
    site.stop()
    store = open_store(site.state)
    kept = [each.sequence for each in store.reports(job) if each.epoch == 1000]
    assert len(kept) == len(set(kept)), "nothing is applied twice"
    assert acknowledged <= set(kept), "no acknowledged report is missing"
    lines = store.ledger(limit=10_000)
    charged = {line.key: line.amount for line in lines}
    assert len(charged) == len(lines), "nothing is charged twice"
    for _, view in store.jobs(states=("ended",), limit=10_000):
        for gpu_type, amount in view.gpu_seconds.items():
            assert charged[f"gpu-seconds:{view.id}:{view.submit_s:.0f}:{gpu_type}"] == amount, "no charge is missing"
    assert any(key.startswith(f"gpu-seconds:{last}:") for key in charged), (
        "at least the last job had GPUs and has ended"
    )
    store.close()
    comments = [slurm_job.comment for slurm_job in site.gateway.jobs(finished=True)]
    for key, known in keys.items():
        found = [comment for comment in comments if f'"penstock_key": "{key}"' in comment]
        assert len(found) <= 1, f"{key} ({known}) was submitted {len(found)} times"


def penstock_ready(site: Site) -> bool:
    with client(site) as penstock:
        return penstock.ready().status == "ok"


def test_kill_9_loses_nothing_that_was_acknowledged(site):
    storm(site, 3, seed=1, waiting=50)


@pytest.mark.long
def test_kill_9_a_hundred_times(site):
    storm(site, 100, seed=2, waiting=500)
