"""The agent's program, killed while NVIDIA's driver has moved a job off its GPU. NVML, the driver and Slurm have stand-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.gpu.sharing import Bench

from tests.profiles import fake_nvml
from tests.profiles.fake_cuda import FakeCuda


@pytest.mark.long
def test_the_program_itself_killed_while_a_job_is_checkpointed(tmp_path: Path, cuda: FakeCuda):
    """Two agents as processes of their own, with stand-ins for NVML, the driver and Slurm. The first is killed."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    bench = Bench("test", tmp_path, dry=True)
    node = bench.node(start_wait_s=0.0, sample_s=0.5)
    scenario = tmp_path / "gpus"
    scenario.write_text(fake_nvml.TWO_GPUS)
    more = fake_nvml.environment(fake_nvml.build(tmp_path), scenario)
    more["LD_LIBRARY_PATH"] += ":" + cuda.variables["LD_LIBRARY_PATH"]
    users = {1: os.getuid(), 2: os.getuid()}
    try:
        for number in (1, 2):
            program = bench.start("import time; time.sleep(600)", **node.environment(number))
            node.job(number, program)
            cuda.add(program.pid)
        first, second = (node.jobs[number].pid for number in (1, 2))
        scenario.write_text(f"{fake_nvml.TWO_GPUS}0.pids {first}:2000 {second}:2000\n")
        node.order([(1,), (2,)], 3.0, users)
        node.start(**more)
        node.until(
            lambda: node.states().get("2") == "running" and stopped(first) and cuda.state(first) == "checkpointed", 180
        )
        assert node.agent is not None
        node.agent.kill()
        node.agent.wait()
        node.start(**more)
        node.until(lambda: cuda.state(first) == "running", 180)
        node.until(lambda: cuda.state(second) == "checkpointed" and not stopped(first), 180)
        node.until(lambda: node.moves("suspend") and node.moves("resume"), 180)
    finally:
        bench.close()


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
