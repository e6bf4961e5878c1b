"""Which processes belong to a cluster. No other process is ever touched."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_loopback import processes, wait_for
from penstock_loopback.processes import Process, alive, end, find, identify

Start = Callable[..., Process]

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
ASLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def starter(code: str = ASLEEP, **environment: str) -> Process:
        child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return identify(child.pid)

    yield starter
    for child in children:
        child.kill()
        child.communicate(timeout=120)


def test_a_pid_that_another_process_has_now_is_left_alone(start: Start) -> None:
    process = start()
    earlier = Process(process.pid, process.start_ticks - 1)
    assert alive(process)
    assert not alive(earlier)
    assert end([earlier], grace_s=0) == set()
    assert alive(process)


def test_a_zombie_is_gone(start: Start) -> None:
    """It is not reaped before the test is over, as in a container where PID 1 reaps nothing."""
    process = start()
    processes.send(process, signal.SIGKILL)
    wait_for(lambda: not alive(process), 120, "the process is a zombie")
    assert Path(f"/proc/{process.pid}").exists()


def test_what_ignores_sigterm_gets_sigkill(start: Start) -> None:
    polite, deaf = start(), start(DEAF)
    assert end([polite, deaf], grace_s=0.2) == set()
    assert not alive(polite)
    assert not alive(deaf)


def test_finds_marked_daemons_and_job_processes_but_no_shell_of_a_user(start: Start, tmp_path: Path) -> None:
    conf = tmp_path / "etc" / "slurm.conf"
    daemon = start(**{processes.MARK: str(tmp_path)})
    job = start(SLURM_CONF=str(conf), SLURMD_NODENAME="t4-00")
    start(SLURM_CONF=str(conf))  # a shell after eval "$(penstock loopback env)"
    start(SLURM_CONF="/etc/slurm/slurm.conf", SLURMD_NODENAME="t4-00")  # a job of the site's own Slurm
    start(**{processes.MARK: f"{tmp_path}-other"})
    assert find(tmp_path, conf) == {daemon, job}


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(TimeoutError, match=r"until pigs fly; last value: 0\nthey sit"):
        wait_for(lambda: 0, 0.05, "pigs fly", poll_s=0.01, details=lambda: "they sit")
