"""The variables that limit tasks, on a real Slurm with a real agent. A small library stands in for HAMi-core."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import JobId, Limit, Pack, SharedGpus
from tests.slurm_plugin.sharing.rig import NODE, Rig

pytestmark = pytest.mark.slurm

LIBRARY = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* Says the limit where the processes of a job count. */
__attribute__((constructor)) static void begin(void)
{
	const char *cache = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE"), *limit = getenv("CUDA_DEVICE_MEMORY_LIMIT");
	const int file = cache && limit ? open(cache, O_WRONLY | O_CREAT, 0600) : -1;

	if (file >= 0 && write(file, limit, strlen(limit)) >= 0)
		close(file);
}
"""


def library(path: Path, text: str) -> Path:
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=text, text=True, check=True)
    path.chmod(0o755)
    return path


def test_tasks_begin_with_their_limits(make_loopback, tmp_path: Path) -> None:
    """A job that preloads something itself goes on doing so. A job alone, and a guaranteed one, have no limits."""
    if not Path("/usr/include/slurm/spank.h").exists() or shutil.which("cc") is None:
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    limiter, own = library(tmp_path / "libvgpu.so", LIBRARY), library(tmp_path / "own.so", "int own;")
    pipes = tmp_path / "mps"
    pipes.mkdir()
    rig = Rig(make_loopback("t4:1x3", agents=True), tmp_path)
    with rig.slurm.settings_file.open("a") as settings:
        settings.write(f"limiter = '{limiter}'\nmps_dir = '{pipes}'\nsuspend_wait_s = 1.0\n")
    rig.slurm.kill_agent(NODE)
    rig.slurm.start_agent(NODE)
    wait_for(lambda: (status := rig.status()) is not None and status.lacks == ("no-mps",), 120, "the agent to answer")

    def variables(job: str) -> dict[str, str]:
        lines = (rig.folder / f"variables-{job}").read_text().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def submit(*flags: str) -> JobId:
        file = f"{rig.folder}/variables-$SLURM_JOB_ID"
        says = f"env | grep -E '^(CUDA_MPS|CUDA_DEVICE|LD_PRELOAD)' >{file}.part; mv {file}.part {file}"
        return JobId(rig.submit(*flags, script=f"{says}; exec sleep 1000"))

    def run(*packs: Pack, gpus: int) -> None:
        jobs = [job for pack in packs for job in pack.jobs]
        rig.wants(dict.fromkeys(jobs, 1), SharedGpus(NODE, gpus, packs))
        rig.until(lambda: all((rig.folder / f"variables-{job}").exists() for job in jobs), "all run")

    alone, first, second = submit(), submit(), submit(f"--export=ALL,LD_PRELOAD={own}")
    together = Pack((first, second), limits=(Limit(memory_mb=3000), Limit(memory_mb=2000)))
    run(Pack((alone,)), together, gpus=2)
    assert variables(alone) == {}
    channel = Path(variables(first)["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).parents[2]
    for job, limit, preload in ((first, "3000m", f"{limiter}"), (second, "2000m", f"{limiter}:{own}")):
        cache = channel / job / "job" / "limiter.cache"
        assert variables(job) == {
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(cache),
            "CUDA_DEVICE_MEMORY_LIMIT": limit,
            "LD_PRELOAD": preload,
        }
        assert cache.read_text() == limit, "the job's processes have loaded it"

    os.mkfifo(pipes / "control")
    guaranteed, other = submit(), submit()
    beside = Pack((guaranteed, other), guaranteed=guaranteed, limits=(Limit(), Limit(memory_mb=1000)))
    run(Pack((alone,)), together, beside, gpus=3)
    assert variables(guaranteed) == {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    (gpu,) = [int(index) for index in (rig.sees(other) or "").split(",")]
    assert variables(other) == {
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(f"{index}=1000M" for index in range(gpu + 1)),
    }
