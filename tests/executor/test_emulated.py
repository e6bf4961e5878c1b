import signal
import time
from pathlib import Path

import pytest

from penstock_executor import Checkpoints, connect
from penstock_profiles.node_channel import RUN_DIR_VARIABLE, JobControl, JobStatus, control_path, statuses_dir

from .spool import JOB, bodies, job_environment, process, reports, tell, wait_for

RATES = '{"t4": {"1": 100, "4": 350}}'


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


def trainer(
    spool: Path | None,
    tmp_path: Path,
    *options: str,
    work: float = 1e9,
    rates: str = RATES,
    run_dir: Path | None = None,
):
    """A trainer of 1,000 samples a real second: rate 100, time scale 10."""
    environment = job_environment(spool)
    if run_dir is not None:
        environment[RUN_DIR_VARIABLE] = str(run_dir)
    return process(
        *("-m", "penstock_executor.emulated", "--rates", rates, "--gpu-type", "t4", "--work", str(work)),
        *("--checkpoint-dir", tmp_path / "ckpt", "--time-scale", "10", "--start-seconds", "0", "--save-seconds", "0"),
        *("--report-every", "0.1", *options),
        environment=environment,
    )


def test_works_to_the_end_and_reports_it(spool: Path, tmp_path: Path):
    tell(spool, 3)
    began = time.monotonic()
    with trainer(spool, tmp_path, "--batch-size", "20", work=500) as child:
        assert child.wait(timeout=240) == 0
    assert time.monotonic() - began >= 0.5
    first, *middle, saved, ended = [report.body for report in reports(spool, 3)]
    assert (first.kind, first.gpu_type, first.progress, first.total) == ("started", "t4", 0, 500)
    assert first.gpu_ids == {"t4-00": (0,)}
    assert middle
    for body in middle:
        assert (body.kind, body.gpus, body.goodput, body.step_time_s, body.atomic_batch) == (
            ("observation", 1, 100, 0.2, 20)
        )
    assert [body.progress for body in middle] == sorted(body.progress for body in middle)
    assert abs(sum(body.steps for body in middle) - 500 / 20) <= 1
    assert (saved.kind, saved.progress) == ("checkpointed", 500)
    assert (ended.kind, ended.outcome, ended.progress) == ("ended", "completed", 500)


def test_a_finished_job_that_is_started_again_is_done_at_once(spool: Path, tmp_path: Path):
    for epoch in (1, 2):
        with trainer(spool, tmp_path, work=100) as child:
            assert child.wait(timeout=240) == 0
        assert bodies(spool, epoch, "ended")[0].outcome == "completed"
    assert bodies(spool, 2, "started")[0].progress == 100


def test_a_late_tick_counts_no_more_than_the_work_that_is_left(spool: Path, tmp_path: Path):
    """It stands still in the middle, as on a busy machine, for the time of a hundred steps."""
    tell(spool, 3)
    with trainer(spool, tmp_path, "--batch-size", "20", work=500) as child:
        wait_for(lambda: bodies(spool, 3, "observation"), "observation")
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        child.send_signal(signal.SIGCONT)
        assert child.wait(timeout=240) == 0
    steps = sum(body.steps for body in bodies(spool, 3, "observation"))
    assert abs(steps - 500 / 20) <= 1


def test_tells_its_agent_the_samples_of_whole_steps_and_of_parts(spool: Path, tmp_path: Path):
    """A step of 20 samples takes two ticks of ten samples each."""
    number = int(JOB)
    statuses_dir(tmp_path, number).mkdir(parents=True)
    control_path(tmp_path, number).write_text(JobControl(number=1).model_dump_json())
    told = statuses_dir(tmp_path, number) / "0.json"

    def status() -> JobStatus | None:
        found = JobStatus.model_validate_json(told.read_bytes()) if told.exists() else None
        return found if found is not None and found.steps >= 5 else None

    with trainer(spool, tmp_path, "--batch-size", "20", "--time-scale", "1", run_dir=tmp_path):
        found = wait_for(status, "5 steps")
    assert 20 * found.steps <= found.samples + 1e-6 < 20 * (found.steps + 1)


def test_saves_on_request_and_trains_on(spool: Path, tmp_path: Path):
    tell(spool, 1)
    with trainer(spool, tmp_path):
        wait_for(lambda: bodies(spool, 1, "observation"), "observation")
        tell(spool, 1, "please")
        (saved,) = wait_for(lambda: bodies(spool, 1, "checkpointed"), "checkpoint")
        assert saved.request == "please"
        wait_for(lambda: bodies(spool, 1, "observation")[-1].progress > saved.progress, "progress afterwards")
        assert Checkpoints(tmp_path / "ckpt", 1).latest().meta == {"progress": saved.progress}
        assert len(bodies(spool, 1, "checkpointed")) == 1


def test_stopped_by_slurm_it_loses_nothing_and_goes_on(spool: Path, tmp_path: Path):
    progress = 0.0
    for epoch in (1, 2):
        with trainer(spool, tmp_path) as child:
            wait_for(lambda epoch=epoch: bodies(spool, epoch, "observation"), "observation")
            child.send_signal(signal.SIGUSR2)
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGCONT)
            assert child.wait(timeout=240) == 143
        assert bodies(spool, epoch, "started")[0].progress == progress
        (ended,) = bodies(spool, epoch, "ended")
        assert ended.outcome == "stopped"
        assert ended.progress > progress
        assert ended.progress == bodies(spool, epoch, "checkpointed")[-1].progress
        progress = ended.progress


def test_stopped_while_it_starts(spool: Path, tmp_path: Path):
    with trainer(spool, tmp_path, "--start-seconds", "300") as child:
        wait_for(lambda: bodies(spool, 1, "started"), "start")
        child.terminate()
        assert child.wait(timeout=240) == 143
    assert bodies(spool, 1, "checkpointed") == []


def test_killed_it_loses_what_was_not_saved(spool: Path, tmp_path: Path):
    with trainer(spool, tmp_path) as child:
        wait_for(lambda: bodies(spool, 1, "started"), "start")
        tell(spool, 1, "a")
        (saved,) = wait_for(lambda: bodies(spool, 1, "checkpointed"), "checkpoint")
        wait_for(lambda: bodies(spool, 1, "observation")[-1:], "observation")
        child.kill()
        child.wait()
    with trainer(spool, tmp_path):
        (started,) = wait_for(lambda: bodies(spool, 2, "started"), "second start")
        assert started.progress == saved.progress


def test_left_behind_it_stops_and_writes_nothing(spool: Path, tmp_path: Path):
    with trainer(spool, tmp_path) as child:
        wait_for(lambda: bodies(spool, 1, "observation"), "observation")
        tell(spool, 2)
        assert child.wait(timeout=240) == 75
    assert bodies(spool, 1, "ended")[0].outcome == "superseded"
    assert Checkpoints(tmp_path / "ckpt", 1).latest() is None


def test_left_behind_without_a_spool(tmp_path: Path):
    with trainer(None, tmp_path) as child:
        wait_for(lambda: (tmp_path / "ckpt" / "epoch-0001").exists(), "start")
        assert connect(tmp_path / "ckpt").epoch == 2
        assert child.wait(timeout=240) == 75
    assert Checkpoints(tmp_path / "ckpt", 2).latest() is None


def test_a_family_reports_the_models_step(spool: Path, tmp_path: Path):
    """1 GPU of type t4, batch 12, in one micro-step: alpha_c + 12 beta_c = 0.175 + 12 x 0.0587 = 0.8794 s."""
    with process(
        *("-m", "penstock_executor.emulated", "--family", "bert-squad", "--fixed-batch", "--gpu-type", "t4"),
        *("--work", "100", "--time-scale", "100", "--start-seconds", "0", "--checkpoint-dir", tmp_path / "ckpt"),
        environment=job_environment(spool),
    ) as child:
        assert child.wait(timeout=240) == 0
    seen = bodies(spool, 1, "observation")[-1]
    assert (seen.atomic_batch, seen.accumulation_steps, seen.grad_sqr) == (12, 0, 1.0)
    assert seen.step_time_s == pytest.approx(0.8794)
    assert seen.goodput == pytest.approx(12 / 0.8794)


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("--family", "gpt-9"), 1, "unknown model family 'gpt-9'; known are"),
        (("--family", "ncf", "--gpu-type", "tpu"), 1, "ncf cannot run on 1 GPUs of type tpu on 1 nodes"),
        (("--rates", '{"t4": 5}'), 2, "the form is"),
        (("--rates", RATES, "--time-scale", "0"), 2, "0 must be positive"),
    ],
)
def test_the_reason_why_it_cannot_run_is_printed(
    spool: Path, tmp_path: Path, options: tuple[str, ...], status: int, says: str
):
    with process(
        *(
            "-m",
            "penstock_executor.emulated",
            "--gpu-type",
            "t4",
            "--work",
            "1",
            "--checkpoint-dir",
            tmp_path,
            *options,
        ),
        environment=job_environment(spool),
    ) as child:
        assert says in child.communicate(timeout=60)[1]
        assert child.returncode == status
    if status == 1:
        assert says in bodies(spool, 1, "ended")[0].text
