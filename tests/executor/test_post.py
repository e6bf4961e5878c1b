"""Reports over HTTP, to the real service over real sockets."""

import socket
import time
from pathlib import Path

import pytest

from penstock_executor import Environment, connect
from penstock_executor.environment import Service, read_environment
from penstock_executor.post import TIMEOUT_S, WAITING, Post
from penstock_loopback.machine import free_ports
from penstock_profiles.wire import MAX_REPORT_BYTES, Checkpointed, Observation, Report, Started
from tests.scheduler.service.api import Api, serving

from .spool import wait_for

STARTED = Started(gpu_type="t4", gpu_ids={"t4-00": (0, 1)})
SEEN = Observation(gpu_type="t4", nodes=1, gpus=2, atomic_batch=32, steps=10, step_time_s=0.5, progress=640)


def report(sequence: int) -> Report:
    return Report(job_id="1", epoch=1, sequence=sequence, time_s=time.time(), body=SEEN)


def stored(api: Api) -> list[tuple[int, int]]:
    """(epoch, sequence) of each report of job 1 that the service has."""
    with api.client("ada") as ada:
        return [(each["epoch"], each["sequence"]) for each in ada.history("1").observations]


def test_a_job_without_the_spool_reports_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock_executor.client.CLOSE_S", 240.0)
    with serving(tmp_path / "api") as api:
        service = Service((api.url,), api.tokens["job 1"])
        run = connect(tmp_path / "ckpt", Environment(job_id="1", service=service))
        for body in (STARTED, SEEN, Checkpointed(progress=640, seconds=0.1)):
            run.report(body)
        run.close("completed", 640)
        (found,) = stored(api)
        assert found[0] == run.epoch == 1


def test_it_learns_the_epoch_that_the_daemon_gave_and_gives_way_to_a_later_one(tmp_path: Path):
    with serving(tmp_path / "api") as api:
        api.submitter.given_epoch = 5
        post = Post(Service((api.url,), api.tokens["job 1"]), "1", 1)
        post.put(report(7))
        wait_for(lambda: stored(api) == [(5, 7)], "report of epoch 5")
        assert not post.superseded
        api.submitter.given_epoch = 6
        post.put(report(8))
        wait_for(lambda: post.superseded, "notice that a later run has begun")
        assert stored(api) == [(5, 7)]


def test_while_the_daemon_is_away_put_does_not_wait_and_the_newest_reports_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    port = free_ports(1)
    post = Post(Service((f"http://127.0.0.1:{port}",), "not known yet"), "1", 1, first_pause_s=0.05)
    began_s = time.monotonic()
    for sequence in range(WAITING + 100):
        post.put(report(sequence))
    assert time.monotonic() - began_s < TIMEOUT_S
    assert post.dropped == 100
    says = f"{port} reports wait"  # other tests' threads may end later than their daemon
    wait_for(lambda: says in caplog.text, "warning")
    with serving(tmp_path / "api", listen=f"127.0.0.1:{port}") as api:
        post.service = Service((api.url,), api.tokens["job 1"])
        wait_for(lambda: not post.waiting, "reports posted")
        assert {number for _, number in stored(api)} <= set(range(100, WAITING + 100))
        assert (1, WAITING + 99) in stored(api)
    assert caplog.text.count(says) == 1


def test_a_daemon_that_does_not_answer_delays_neither_a_report_nor_the_end_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock_executor.post.TIMEOUT_S", 240.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        post = Post(Service((f"http://127.0.0.1:{mute.getsockname()[1]}",), "t"), "1", 1)
        began_s = time.monotonic()
        post.put(report(0))
        post.close(0.5)
        assert time.monotonic() - began_s < 120


def test_what_is_refused_for_good_is_not_sent_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with serving(tmp_path / "api") as api:
        post = Post(Service((api.url,), api.tokens["job 1"]), "1", 1)
        bad = report(0)
        post.put(bad.model_copy(update={"body": SEEN.model_copy(update={"step_time_s": 1e-8})}))
        post.put(report(1))
        post.close(20)
        assert stored(api) == [(1, 1)]
        assert "not plausible" in caplog.text


def test_size_and_rate_of_reports_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = connect(None, Environment(job_id="1", spool=tmp_path))
    run.report(Started(gpu_type="x" * MAX_REPORT_BYTES, gpu_ids={}))
    assert "too long for a report" in caplog.text
    for _ in range(2_000):
        run.report(SEEN)
    run.close("failed", 0, "x" * MAX_REPORT_BYTES)
    lines = (tmp_path / "1" / "reports" / "1.jsonl").read_bytes().splitlines()
    assert 300 < len(lines) < 1_000
    assert max(map(len, lines)) < 3_000
    assert [Report.model_validate_json(line).sequence for line in lines] == list(range(len(lines)))


def test_the_service_and_the_token_come_from_the_environment():
    given = {"SLURM_JOB_ID": "7", "PENSTOCK_URL": "https://head:7000", "PENSTOCK_TOKEN": "secret", "PENSTOCK_CA": "/ca"}
    service = read_environment(given).service
    assert service == Service(("https://head:7000",), "secret", Path("/ca"))
    assert "secret" not in repr(service)


@pytest.mark.parametrize("url", ["head:7000", "https://head1:7373,head2", "https://head1:7373;https://head2:7373"])
def test_an_address_with_another_form_ends_no_training(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture):
    """sbatch exports it from the user's shell into every job."""
    given = {"SLURM_JOB_ID": "7", "PENSTOCK_URL": url}
    for _ in range(3):
        run = connect(tmp_path, read_environment(given))
        run.report(SEEN)
        run.close("completed", 640)
    assert caplog.text.count(f"no reports go to the API: PENSTOCK_URL={url}") == 1


def test_of_several_daemons_the_one_that_answers_gets_the_reports(tmp_path: Path):
    """High availability: PENSTOCK_URL names both. The second one takes over, and then the first one again."""
    ports = free_ports(2)
    both = {"PENSTOCK_URL": ", ".join(f"http://127.0.0.1:{port}" for port in (ports, ports + 1)), "SLURM_JOB_ID": "1"}
    urls = read_environment(both).service.urls
    post = Post(Service(urls), "1", 1, first_pause_s=0.05)
    for sequence, leader in enumerate((1, 0)):
        with serving(tmp_path / "api", listen=urls[leader].removeprefix("http://")) as api:
            post.service = Service(urls, api.tokens["job 1"])
            post.put(report(sequence))
            wait_for(lambda: not post.waiting, "report posted")
            assert (1, sequence) in stored(api)
