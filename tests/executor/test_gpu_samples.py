"""NVML's samples in a job's reports, from a stand-in for NVIDIA's driver library."""

from pathlib import Path

import pytest

from penstock_executor.gpu_samples import readings_of_job
from penstock_profiles.nvml import Device, Process, Reading, Sample
from tests.profiles import fake_nvml

from .spool import bodies, job_environment, process

REPORTING = """
import sys, time
sys.modules["torch"] = None  # a job of another framework reports, too
from penstock_executor import connect
from penstock_executor.training.reporter import Reporter
from penstock_profiles.wire import Observation
client = connect()
reporter = Reporter(client, lambda body: None)
body = Observation(gpu_type="a100", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=1, progress=8)
time.sleep(0.5)
reporter.put(body)
reporter.close("completed", 8)
"""


def report(spool: Path, **more: str):
    spool.mkdir()
    with process("-c", REPORTING, environment=job_environment(spool) | more) as child:
        _, said = child.communicate(timeout=60)
        assert child.returncode == 0, said
    (seen,) = bodies(spool, 1, "observation")
    return seen


def test_reports_say_how_busy_and_how_full_the_jobs_gpus_are(tmp_path: Path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    (tmp_path / "gpus").write_text(fake_nvml.TWO_GPUS)
    library = fake_nvml.environment(fake_nvml.build(tmp_path), tmp_path / "gpus")
    there = {name: library[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}
    gpus = {"SLURM_JOB_GPUS": "0", "SLURM_GPUS_ON_NODE": "1"}
    seen = report(tmp_path / "spool", **there, **gpus)
    assert (seen.utilisation, seen.device_memory_mb) == (0.75, 1024)


def test_without_nvidias_library_reports_have_no_samples(tmp_path: Path):
    seen = report(tmp_path / "spool")
    assert (seen.utilisation, seen.device_memory_mb) == (None, None)


def test_a_jobs_gpus_are_those_of_its_process_else_those_of_its_indices():
    def reading(index: int, *pids: int) -> Reading:
        device = Device(index, f"GPU-{index}", "A100", "a100", 40960)
        return Reading(device, 100, 0.5, None, tuple(Process(pid, 1, None) for pid in pids))

    sample = Sample((reading(0, 7), reading(1, 8), reading(2)), ())
    assert [each.device.index for each in readings_of_job(sample, (5,), pid=8)] == [1]
    assert [each.device.index for each in readings_of_job(sample, (1, 2), pid=99)] == [1, 2]
    assert len(readings_of_job(sample, (4, 5, 6), pid=99)) == 3, "confined, there are no others"
