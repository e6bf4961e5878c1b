"""The driver's checkpoints of CUDA processes, with a stand-in for the driver: no GPU here."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_profiles.cuda_checkpoint import NO_DRIVER, NO_ROOM, NOT_UNDONE, too_old

from . import fake_nvml
from .fake_cuda import FakeCuda


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def program() -> Iterator[int]:
    """A process that could use CUDA."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def ask(cuda: FakeCuda, verb: str, *pids: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(verb, *pids), env=cuda.environment() | more, capture_output=True, text=True, timeout=60
    )


def command(verb: str, *words: object) -> list[str]:
    return [sys.executable, "-m", "penstock_profiles.cuda_checkpoint", verb, *map(str, words)]


@pytest.mark.parametrize("needs", ["2000", "0"])
def test_nothing_is_restored_without_room(cuda: FakeCuda, program: int, needs: str):
    """On an H100, each later restore failed, too, and the process was lost. 0: unknown, so all memory of its own counts."""
    cuda.add(program)
    assert ask(cuda, "suspend", program).returncode == 0
    for free, status in (("10", NO_ROOM), ("2255", NO_ROOM if needs == "2000" else 0), ("2256", 0)):
        done = ask(cuda, "resume", program, "--free", free, "--needs", needs)
        assert done.returncode == status, (free, done.stderr)
        if status:
            assert f"MB of its GPU, and {free} MB are free" in done.stderr
            assert cuda.state(program) == "checkpointed"
    assert cuda.calls() == ["lock", "checkpoint", "restore", "unlock"]


def test_twice_suspended_is_once(cuda: FakeCuda, program: int):
    cuda.add(program)
    states = []
    for verb in ("suspend", "suspend", "resume", "resume"):
        done = ask(cuda, verb, program)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"^{verb} took [0-9.]+ s$", done.stdout, re.MULTILINE)
        states.append(cuda.state(program))
    assert states == ["checkpointed", "checkpointed", "running", "running"]
    assert cuda.calls() == ["lock", "checkpoint", "restore", "unlock"]


def test_by_hand_nvml_is_asked_whether_there_is_room(cuda: FakeCuda, program: int, tmp_path: Path):
    """There may be several GPUs, and nobody says which: all must have room."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    cuda.add(program)
    assert ask(cuda, "suspend", program).returncode == 0
    scenario = tmp_path / "gpus"
    more = fake_nvml.environment(fake_nvml.build(tmp_path), scenario)
    more["LD_LIBRARY_PATH"] += ":" + cuda.variables["LD_LIBRARY_PATH"]
    for used, status in ((15000, NO_ROOM), (3, 0)):
        scenario.write_text(fake_nvml.TWO_GPUS.replace("1.used 3", f"1.used {used}"))
        done = ask(cuda, "resume", program, "--needs", "2000", **more)
        assert done.returncode == status, done.stderr
    assert cuda.state(program) == "running"


def test_what_was_locked_when_a_helper_died_can_be_suspended_and_resumed(cuda: FakeCuda, program: int):
    cuda.add(program, "l")
    assert ask(cuda, "resume", program).returncode == 0
    assert cuda.state(program) == "running"
    cuda.add(program, "l")
    assert ask(cuda, "suspend", program).returncode == 0
    assert cuda.state(program) == "checkpointed"


@pytest.mark.parametrize(("call", "error"), [("lock", 600), ("checkpoint", 801), ("checkpoint", 2)])
def test_a_process_that_cannot_be_suspended_runs_on(cuda: FakeCuda, program: int, call: str, error: int):
    cuda.add(program)
    cuda.set(call, str(error))
    done = ask(cuda, "suspend", program)
    assert done.returncode == 1
    assert done.stderr == f"the driver's {call} of process {program} failed: error number {error} ({error})\n"
    assert cuda.state(program) == "running"


def test_a_process_that_may_stay_locked_is_told_apart(cuda: FakeCuda, program: int):
    cuda.add(program)
    cuda.set("checkpoint", "801")
    cuda.set("unlock", "999")
    assert ask(cuda, "suspend", program).returncode == NOT_UNDONE
    assert cuda.state(program) == "locked"
    cuda.unset("unlock")
    assert ask(cuda, "resume", program).returncode == 0
    assert cuda.state(program) == "running"
    cuda.set("checkpoint", "break 999")
    assert ask(cuda, "suspend", program).returncode == NOT_UNDONE
    done = ask(cuda, "resume", program)
    assert done.returncode == 1
    assert "its CUDA calls fail, too" in done.stderr


def test_resume_without_room_can_be_repeated(cuda: FakeCuda, program: int):
    cuda.add(program, "c")
    cuda.set("restore", "2")
    done = ask(cuda, "resume", program)
    assert (done.returncode, cuda.state(program)) == (1, "checkpointed")
    assert "restore of process" in done.stderr
    cuda.unset("restore")
    assert ask(cuda, "resume", program).returncode == 0
    assert cuda.state(program) == "running"


def test_resume_skips_processes_without_cuda_and_leaves_none_out(cuda: FakeCuda, program: int):
    cuda.add(os.getpid(), "f")
    cuda.add(program, "c")
    done = ask(cuda, "resume", 1, os.getpid(), program)
    assert done.returncode == 1  # for the one that failed
    assert cuda.state(program) == "running"
    assert ask(cuda, "resume", 1).returncode == 0


def test_it_is_not_interrupted_between_two_calls(cuda: FakeCuda, program: int):
    """A service manager sends SIGTERM to all processes of an agent that is stopped."""
    cuda.add(program)
    cuda.set("lock", "slow 1000")
    with subprocess.Popen(command("suspend", program), env=cuda.environment()) as helper:
        while not cuda.calls():
            time.sleep(0.01)
        helper.send_signal(signal.SIGTERM)
        assert helper.wait(30) == 0
    assert cuda.state(program) == "checkpointed"


def test_the_message_names_what_is_missing(cuda: FakeCuda, tmp_path: Path):
    done = ask(cuda, "suspend", 1, LD_LIBRARY_PATH="/nonexistent")
    assert done.returncode == NO_DRIVER
    assert "NVIDIA's driver is not here: libcuda.so.1" in done.stderr
    (tmp_path / "old").mkdir()
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned flags) { return flags; }\n")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "old" / "libcuda.so.1", source], check=True)
    done = ask(cuda, "suspend", 1, LD_LIBRARY_PATH=str(tmp_path / "old"))
    assert (done.returncode, done.stderr) == (NO_DRIVER, "NVIDIA's driver is too old; 570 or later is needed\n")
    assert [too_old(each) for each in ("550.54.15", "570.86.15", None, "")] == [True, False, False, False]
