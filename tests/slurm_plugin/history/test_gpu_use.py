"""How busy GPUs were, from a real Prometheus with the metrics of the exporters that sites have."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from penstock_loopback.machine import free_ports
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_slurm.history.figures import report
from penstock_slurm.history.gpu_use import GpuUse, Prometheus
from tests.slurm_plugin.history.conftest import ServeSamples
from tests.slurm_plugin.history.test_figures import BEGIN_S, HOUR, history, line


def samples(series: str, hours: dict[tuple[float, float], float]) -> str:
    """A minute apart: (begin, end), hours since BEGIN_S -> percent."""
    return "".join(
        f"{series} {percent} {BEGIN_S + minute * 60}\n"
        for (begin, end), percent in hours.items()
        for minute in range(round(begin * 60) + 1, round(end * 60) + 1)
    )


GPU = 'gpu="0",UUID="GPU-1",Hostname="n1"'


@pytest.mark.parametrize(
    ("metric", "label", "others"),
    [
        ("DCGM_FI_DEV_GPU_UTIL", "hpc_job", GPU),
        ("nvidia_gpu_duty_cycle", "jobid", 'ordinal="0",minor_number="0",uuid="GPU-1",userid="1000"'),
        ("slurm_job_utilization_gpu", "slurmjobid", 'user="ada",account="lab",gpu="0",gpu_type="NVIDIA A100"'),
    ],
)
def test_the_exporters_that_sites_have_are_found(
    prometheus: ServeSamples, metric: str, label: str, others: str
) -> None:
    """Two days, so that it takes two questions. GPUs without a job do not count, nor do jobs that Slurm's history has not."""
    text = f"# TYPE {metric} gauge\n"
    text += samples(f'{metric}{{{others},{label}="7"}}', {(20, 24): 100, (24, 26): 50, (26, 28): 0})
    text += samples(f'{metric}{{{others},{label}="0"}}', {(30, 31): 100})
    text += samples(f'{metric}{{{others},{label}=""}}', {(31, 32): 100})
    text += samples(f'{metric}{{{others},{label}="9"}}', {(33, 34): 100})
    found = Prometheus(prometheus(text)).use({"7", "8"}, BEGIN_S, BEGIN_S + 48 * HOUR)
    assert found.keys() == {"7"}
    # For five minutes after its last sample, Prometheus takes a series for there, unless it has seen the exporter leave it out.
    assert found["7"].seen_gpu_h == pytest.approx(8, abs=0.1)
    assert found["7"].busy_gpu_h == pytest.approx(5, abs=0.1)
    assert found["7"].idle_gpu_h == pytest.approx(2, abs=0.1)


def test_one_cluster_of_several_is_named_in_the_metric(prometheus: ServeSamples) -> None:
    text = "# TYPE busy gauge\n"
    text += samples('busy{cluster="c1",number="7"}', {(0, 2): 100}) + samples(
        'busy{cluster="c2",number="7"}', {(0, 2): 0}
    )
    url = prometheus(text)
    both = Prometheus(url, "busy:number").use({"7"}, BEGIN_S, BEGIN_S + 4 * HOUR)
    one = Prometheus(url, 'busy{cluster="c1"}:number').use({"7"}, BEGIN_S, BEGIN_S + 4 * HOUR)
    assert (both["7"].seen_gpu_h, one["7"].seen_gpu_h) == (pytest.approx(4, abs=0.2), pytest.approx(2, abs=0.1))
    job = history(line("7", start=0, end=2, held="gres/gpu=1"))
    use = report(job, both).use
    assert use is not None
    assert (use.implausible_jobs, use.seen_gpu_h) == (1, 0)
    use = report(job, one).use
    assert use is not None
    assert (use.implausible_jobs, use.busy_gpu_h, use.idle_gpu_h) == (0, pytest.approx(2), 0)


def test_the_first_metric_that_is_there_is_taken_and_none_is_told(prometheus: ServeSamples) -> None:
    url = prometheus("# TYPE busy gauge\n" + samples('busy{number="7"}', {(0, 1): 100}))
    with pytest.raises(
        PenstockError, match=r"no series with a job's number.*DCGM_FI_DEV_GPU_UTIL:hpc_job.*--gpu-metric"
    ):
        Prometheus(url).use({"7"}, BEGIN_S, BEGIN_S + HOUR)
    with pytest.raises(PenstockError, match="no series"):
        Prometheus(url, "busy:job").use({"7"}, BEGIN_S, BEGIN_S + HOUR)
    with pytest.raises(PenstockError, match=r"HTTP 400: .*parse error"):
        Prometheus(url, "busy{x=}:number").use({"7"}, BEGIN_S, BEGIN_S + HOUR)


def answering(respond: Callable[[httpx.Request], httpx.Response]) -> Prometheus:
    return Prometheus("http://ada:secret@prometheus:9090/path", transport=httpx.MockTransport(respond))


@pytest.mark.parametrize(
    ("respond", "told"),
    [
        (lambda _: httpx.Response(200, text="<html>"), "HTTP 200, and no JSON: is this Prometheus' address"),
        (lambda _: httpx.Response(401, json={}), "HTTP 401: no success"),
        (lambda _: httpx.Response(200, json=["7"]), "HTTP 200: no success"),
        (
            lambda _: httpx.Response(200, json={"status": "success", "data": {"result": [{"metric": {}}]}}),
            "another form",
        ),
        (
            lambda _: httpx.Response(503, json={"status": "error", "error": "too many samples"}),
            "HTTP 503: too many samples",
        ),
    ],
)
def test_an_answer_that_is_none_is_told_without_the_password(
    respond: Callable[[httpx.Request], httpx.Response], told: str
) -> None:
    with pytest.raises(PenstockError, match=told) as error:
        answering(respond).use({"7"}, 0, 60)
    assert str(error.value).startswith("Prometheus on prometheus: ")
    assert "secret" not in str(error.value)


def test_where_nothing_answers_it_says_where() -> None:
    with pytest.raises(PenstockError, match=r"Prometheus on 127.0.0.1: .*refused"):
        Prometheus(f"http://127.0.0.1:{free_ports(1)}").use({"7"}, 0, 60)


def test_questions_go_to_the_path_with_the_password_and_samples_that_are_no_numbers_do_not_count() -> None:
    asked: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if "label" in request.url.path:
            return httpx.Response(200, json={"status": "success", "data": ["7"]})
        result = [{"metric": {"hpc_job": job}, "value": [60, value]} for job, value in (("7", "NaN"), ("8", "12"))]
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": result}})

    assert answering(respond).use({"7", "8"}, 0, 60) == {"8": GpuUse(1.0, pytest.approx(0.01), 1.0)}
    assert {request.url.path.partition("/api/")[0] for request in asked} == {"/path"}
    assert all(request.headers["Authorization"].startswith("Basic ") for request in asked)


@pytest.mark.parametrize(
    ("url", "metric", "told"),
    [
        ("prometheus:9090", None, "give an address such as http"),
        ("http://", None, "give an address such as http"),
        ("http://p:9090", "busy", "the label that has the job's number"),
        ("http://p:9090", "sum(busy):job", "the label that has the job's number"),
    ],
)
def test_wrong_options_are_told_at_once(url: str, metric: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Prometheus(url, metric)


def test_figures_of_use_are_of_the_hours_that_jobs_held() -> None:
    """Samples miss a part of a job. Job 1 was busy, 2 waited with its GPUs for half of its time, 3 was never seen."""
    jobs = history(
        line("1", start=0, end=4, held="gres/gpu=2"),
        line("2", start=0, end=2, held="gres/gpu=1", user="bob"),
        line("2", ready=2, start=3, end=5, held="gres/gpu=1", user="bob", state="TIMEOUT"),
        line("3", start=0, end=1, held="gres/gpu=1", user="eve"),
    )
    found = report(jobs, {"1": GpuUse(4.0, 3.0, 0.4), "2": GpuUse(4.0, 0.4, 2.0), "4": GpuUse(9.0, 9.0, 0.0)})
    use = found.use
    assert use is not None
    assert (use.seen_gpu_h, use.busy_gpu_h, use.idle_gpu_h) == (
        pytest.approx(12),
        pytest.approx(8 * 0.75 + 4 * 0.1),
        pytest.approx(0.8 + 2),
    )
    (idle,) = use.idle_jobs
    assert (idle.job_id, idle.user, idle.state, idle.gpus, idle.gpu_h) == ("2", "bob", "TIMEOUT", 1, pytest.approx(4))
    assert (idle.idle_gpu_h, idle.busy) == (pytest.approx(2), pytest.approx(0.1))
    assert {group.name: group.busy for group in found.by_user} == {"ada": 0.75, "bob": pytest.approx(0.1), "eve": None}
    assert report(jobs).use is None
