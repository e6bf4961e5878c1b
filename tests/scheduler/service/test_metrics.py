"""What Prometheus would scrape, read with the client library's own parser; and what refers to it."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock_scheduler import __version__
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.daemon.service.metrics import _cloud
from penstock_scheduler.model import CloudRun, CloudState, Offer, Phase, Plan, Stop, StopCode, UnknownValue
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import serving

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def scraped(tmp_path):
    with serving(tmp_path) as api:
        for key, amount in (("a", 1.5), ("b", 2.0)):
            line = LedgerLine(
                id=0, key=key, time_s=1.0, account=key, user="ada", job="1", kind="usd", amount=amount, text=""
            )
            api.board.store.charge([line])
        headers = {"Authorization": f"Bearer {api.tokens['ada']}"}
        answer = httpx.get(f"{api.url}/v1/metrics", headers=headers)
        assert answer.status_code == 200
        yield answer.text


def test_the_cluster_in_numbers(scraped):
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }
    assert samples["penstock_gpus", "allocated", "t4"] == 2
    assert samples["penstock_gpus", "free", "t4"] == 6
    assert samples["penstock_jobs", "running"] == 1
    assert samples["penstock_jobs", "queued"] == 1
    assert samples["penstock_round_duration_seconds_count", "decide"] == 0  # the test gives the board no round
    assert samples["penstock_build_info", __version__] == 1
    assert samples["penstock_round",] == 1
    assert 0 <= time.time() - samples["penstock_last_observation_timestamp_seconds",] < 600
    assert samples["penstock_paused",] == 0
    assert samples["penstock_cloud_spent_usd_total",] == 3.5
    assert samples["penstock_events_total", "requests"] >= 1
    assert "ada" not in scraped


def test_names_and_types_follow_prometheus_conventions(scraped):
    """Counters end in _total and no gauge does; times are in base units; nothing is there twice."""
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.M)
    assert len(kinds) == len(dict(kinds))
    assert {kind for _, kind in kinds} == {"counter", "gauge", "histogram"}
    for name, kind in kinds:
        assert name.endswith("_total") == (kind == "counter"), name
        assert not name.endswith(("_days", "_hours", "_minutes", "_ms", "_age_seconds", "_created")), name


def test_counters_start_at_zero(scraped):
    """Otherwise Prometheus never sees their first growth, and an alert on `increase` never fires for it."""
    for line in ('penstock_events_total{kind="store away"} 0.0', 'penstock_stops_total{code="gain"} 0.0'):
        assert line in scraped.splitlines()
    assert "penstock_job_restarts_total 0.0" in scraped


def test_what_happens_is_counted(tmp_path):
    with serving(tmp_path) as api:
        submit_s = time.time() - 100
        api.look(job("7", submit_s=submit_s))
        for restarts in (0, 2):
            running = job("7", submit_s=submit_s, phase=Phase.RUNNING, allocation=on("t4", t4_01=2), restarts=restarts)
            api.look(running)
        record = api.board.record
        stops = {"1": Stop(StopCode.DRAIN, "its node is drained"), "7": Stop(StopCode.DRAIN, "its node is drained")}
        api.board.decided(dataclasses.replace(record, plan=dataclasses.replace(record.plan, stops=stops)))
        headers = {"Authorization": f"Bearer {api.tokens['ada']}"}
        lines = [httpx.get(f"{api.url}/v1/metrics", headers=headers).text for _ in range(2)][-1].splitlines()
    assert 'penstock_job_wait_seconds_bucket{le="60.0"} 0.0' in lines
    assert 'penstock_job_wait_seconds_bucket{le="600.0"} 1.0' in lines
    assert "penstock_job_restarts_total 2.0" in lines
    assert 'penstock_stops_total{code="drain"} 2.0' in lines
    assert 'penstock_round_duration_seconds_count{phase="decide"} 1.0' in lines
    counted = [line.split()[-1] for line in lines if 'request_duration_seconds_count{method="GET"}' in line]
    assert float(counted[0]) >= 1


def test_the_cloud_in_numbers():
    """Two runs: one at $1.00 an hour, one at $3.00 that is only ordered."""
    offer = Offer("vm1", "a10g", 1, 1, 1.0)
    runs = (
        CloudRun("1", offer, 0.0, 5.0),
        CloudRun("2", dataclasses.replace(offer, usd_per_h=3.0), 0.0, 5.0, state="ordered"),
    )
    base = snapshot("t4:1x1", [])
    record = RoundRecord(dataclasses.replace(base, cloud=CloudState(runs=runs)), PolicyChoice(name="fifo"), Plan(1))
    found = {
        (sample.name, *sample.labels.values()): sample.value for each in _cloud(record, 10.0) for sample in each.samples
    }
    assert found["penstock_cloud_runs", "running"] == found["penstock_cloud_runs", "ordered"] == 1
    assert found["penstock_cloud_runs", "booting"] == 0
    assert found["penstock_cloud_usd_per_hour",] == 1.0
    assert found["penstock_cloud_committed_usd",] == 10.0
    assert found["penstock_cloud_protected",] == 0.0
    assert not [sample for each in _cloud(None, None) for sample in each.samples]


def test_an_instance_that_outlives_its_job_is_a_warning_and_counted(tmp_path):
    """The burst manager tells it among the cloud's troubles, ten minutes after the job's end."""
    told = "i-1 of job 7 has not ended, 10 min after its job: end it by hand"
    with serving(tmp_path) as api:
        headers = {"Authorization": f"Bearer {api.tokens['ada']}"}

        def lines() -> list[str]:
            return httpx.get(f"{api.url}/v1/metrics", headers=headers).text.splitlines()

        assert "penstock_warnings 0.0" in lines()
        api.vitals.loop.cloud_troubles = (told,)
        assert "penstock_warnings 1.0" in lines()
        with api.client("ada") as ada:
            assert ada.ready().warnings == [told], "penstock doctor says it"


def test_what_slurm_says_in_unknown_words_is_counted_and_a_warning(tmp_path):
    unknown = (
        UnknownValue("job", "State", "State=DREAMING", ("1", "2")),
        UnknownValue("job", "State", "State=WAKING", ("3",)),
        UnknownValue("node", "State", "State=IDLE+TIRED", ("n0",)),
    )
    with serving(tmp_path) as api:
        state = api.board.state
        api.board.observed(dataclasses.replace(state, unknown=unknown), time.time())
        with api.client("ada") as ada:
            health = ada.ready()
            assert (health.status, len(health.warnings)) == ("ok", 3), "the daemon works; admins should look"
            assert health.warnings[0].startswith("State=DREAMING of 2 jobs is not known to Penstock, which leaves them")
            assert "node n0" in health.warnings[2]
        headers = {"Authorization": f"Bearer {api.tokens['ada']}"}
        lines = httpx.get(f"{api.url}/v1/metrics", headers=headers).text.splitlines()
        assert 'penstock_unknown_values{field="State",kind="job"} 3.0' in lines
        assert 'penstock_unknown_values{field="State",kind="node"} 1.0' in lines


def test_a_node_that_did_not_boot_is_a_warning_and_one_that_sleeps_is_not(tmp_path):
    with serving(tmp_path) as api:
        state = api.board.state
        first, *others = state.nodes
        sleeps = dataclasses.replace(first, boot_s=90.0, note="is powered down; Slurm wakes it in about 2 min")
        failed = dataclasses.replace(
            first, name="n9", may_start=False, note="did not boot within 10 min (ResumeTimeout)"
        )
        api.board.observed(dataclasses.replace(state, nodes=(sleeps, failed, *others)), time.time())
        with api.client("ada") as ada:
            assert ada.ready().warnings == ["node n9 did not boot within 10 min (ResumeTimeout)"]
            assert [node.note for node in ada.nodes() if node.name == first.name] == [sleeps.note]


def test_dashboard_and_alerts_name_metrics_that_are_there(scraped):
    """The names in their queries, beside what a scrape brings."""
    known = set(re.findall(r"^# TYPE (\S+)", scraped, re.M)) | set(re.findall(r"^(penstock_\w+)", scraped, re.M))
    dashboard = (REPOSITORY / "deploy/grafana/penstock.json").read_text()
    panels = json.loads(dashboard)["panels"]
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    alerts = (REPOSITORY / "deploy/prometheus/penstock-alerts.yaml").read_text()
    for text in (dashboard, alerts):
        named = set(re.findall(r"penstock_\w+", text))
        assert named
        assert named <= known | {"penstock_round_gap_ratio", "penstock_api_daemon_up"}
