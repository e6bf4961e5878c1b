"""NVML that is missing, or comes later than the agent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback.processes import wait_for
from penstock_profiles.nvml import NoNvml, Sample
from penstock_scheduler.api.agent_messages import NodeStatus, status_file
from penstock_scheduler.people.errors import PenstockError
from penstock_slurm.agent import driver
from penstock_slurm.agent.driver import Driver
from tests.profiles import fake_nvml

from .node import Node

NOT_LOADED = "init 9\n"

PROGRAM = """
import sys
from pathlib import Path
from penstock_slurm.agent import driver, main
driver.LOOK_AGAIN_S, driver.PCI = 0.5, Path(sys.argv.pop(1))
sys.exit(main.main())
"""


def on_pci(folder: Path, vendor: str = "0x10de", kind: str = "0x030200") -> Path:
    device = folder / "pci" / "0000:07:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    return folder / "pci"


class Opens:
    """NVML that can be opened if nothing fails."""

    text = ""

    def __enter__(self) -> Opens:
        if self.text:
            raise NoNvml("driver", self.text)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sample(self) -> Sample:
        return Sample((), ())


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Opens]:
    class Fresh(Opens):
        pass

    monkeypatch.setattr(driver, "Nvml", Fresh)
    monkeypatch.setattr(driver, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(driver, "PCI", tmp_path / "pci")
    monkeypatch.setattr(driver, "DEVICES", tmp_path / "devices")
    return Fresh


def test_an_agent_that_starts_before_the_driver_measures_once_that_is_loaded(tmp_path: Path):
    """The program itself, on a stand-in for NVIDIA's library. The admin sees what is missing until then."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    scenario = tmp_path / "scenario"
    scenario.write_text(fake_nvml.TWO_GPUS + NOT_LOADED)
    settings = tmp_path / "penstock.toml"
    settings.write_text(
        f'[slurm]\npartitions = ["gpu"]\nspool_dir = "{tmp_path}/spool"\nconf = "{tmp_path}/slurm.conf"\n'
        f'[agent]\nrun_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
    )
    (tmp_path / "spool").mkdir()
    command = [sys.executable, "-c", PROGRAM, str(on_pci(tmp_path)), "--config", str(settings), "--node", "n0"]
    environment = fake_nvml.environment(fake_nvml.build(tmp_path), scenario)
    file = status_file(tmp_path / "spool", "n0")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as agent:
        try:
            wait_for(file.exists, 120, "a status")
            status = NodeStatus.model_validate_json(file.read_bytes())
            assert (status.lacks, status.gpu_memory_mb) == (("no-nvml",), {})
            scenario.write_text(fake_nvml.TWO_GPUS)

            def measures() -> bool:
                told = NodeStatus.model_validate_json(file.read_bytes())
                return told.lacks == () and told.gpu_memory_mb == {"a100": 40960, "t4": 15360}

            wait_for(measures, 120, "measurements")
            agent.terminate()
            assert agent.wait() == 0
        finally:
            agent.kill()
        assert agent.stderr is not None
        said = agent.stderr.read()
    assert said.count("no samples of GPUs") == 1, said
    assert "installed but not loaded" in said


@pytest.mark.parametrize(
    ("vendor", "kind", "lacks"),
    [
        ("0x10de", "0x030200", True),
        ("0x10de", "0x030000", True),
        ("0x10de", "0x068000", False),
        ("0x1002", "0x030000", False),
    ],
    ids=["gpu", "display", "nvswitch", "another-vendor"],
)
def test_nvml_is_missing_only_where_there_is_a_gpu(
    nvml: type[Opens], tmp_path: Path, vendor: str, kind: str, *, lacks: bool
):
    """Nothing is amiss in a test cluster, which has no GPU."""
    nvml.text = "the driver is not loaded"
    on_pci(tmp_path, vendor, kind)
    found = Driver("n0")
    assert (found.nvml, found.lack) == (None, nvml.text if lacks else "")
    nvml.text = ""
    assert found.has_come() == lacks
    assert not found.has_come(), "the agent begins anew once"


@pytest.mark.parametrize("before", [False, True])
def test_an_agent_ends_that_may_not_use_a_driver_which_was_loaded_later(
    nvml: type[Opens], tmp_path: Path, *, before: bool
):
    """systemd looks up which devices a service may use when it starts the service. The next agent may use them."""
    on_pci(tmp_path)
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n  1 mem\n195 nvidia\n" if before else "Character devices:\n  1 mem\n")
    nvml.text = "this user may not use NVIDIA's driver"
    found = Driver("n0")
    assert not found.has_come()
    devices.write_text("Character devices:\n  1 mem\n195 nvidia\n")
    if before:
        assert not found.has_come()
        return
    with pytest.raises(PenstockError, match="loaded after the agent had started, which ends now: this user may not"):
        found.has_come()


def test_the_status_says_that_nothing_is_measured(make_node: Callable[..., Node], caplog: pytest.LogCaptureFixture):
    node = make_node()
    node.no_nvml = lambda: "the driver is not loaded"
    node.start().tick(0.0)
    assert node.agent.status().lacks == ("no-nvml",)
    (text,) = [each.__dict__["text"] for each in caplog.records if each.__dict__.get("lack") == "no-nvml"]
    assert text == "neither GPU memory nor GPU time of jobs is measured: the driver is not loaded"
