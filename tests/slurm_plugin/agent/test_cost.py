"""The cost of an agent on its node."""

import os
import re
import sys
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.agent_messages import NodeStatus, status_file
from penstock_scheduler.model import JobId, Pack
from tests.profiles import fake_nvml

MOST_MIB = 60


def test_an_agent_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its peak resident memory, as a process of its own with NVML, after time slices of four jobs on two GPUs."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    import agent as benchmark

    node = f"n{os.getpid()}"
    monkeypatch.setattr(benchmark, "NODE", node)
    (tmp_path / "gpus").write_text(fake_nvml.TWO_GPUS)
    for name, value in fake_nvml.environment(fake_nvml.build(tmp_path), tmp_path / "gpus").items():
        monkeypatch.setenv(name, value)
    site = benchmark.Site(tmp_path)
    log = tmp_path / "agent.log"
    try:
        for number in range(1, 5):
            site.job(number)
        site.order([Pack((JobId(str(number)),)) for number in range(1, 5)], gpus=2, slice_s=0.5)
        agent = site.agent()

        def has_worked() -> bool:
            path = status_file(site.spool, node)
            status = NodeStatus.model_validate_json(path.read_bytes()) if path.exists() else None
            sampled = status is not None and len(status.gpu_memory_mb) == 2
            return sampled and log.read_text().count(" event=suspended ") >= 4

        wait_for(has_worked, 120, "time slices, and a sample of the GPUs", details=log.read_text)
        told = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{agent.pid}/status").read_text(), re.MULTILINE)
        assert told is not None
        assert int(told[1]) / 1024 < MOST_MIB
    finally:
        site.close()
