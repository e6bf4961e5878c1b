"""What the SPANK plugin reads of the agent's files, without Slurm, and under valgrind where that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_slurm.agent.channel import Channels
from penstock_slurm.install.sources import source

NO_SHARER, BOUND, TOO_LATE, NOT_OURS = range(4)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (Debian: gcc)")
    made = tmp_path_factory.mktemp("bind") / "bind"
    spank = source("spank")
    flags = ("-std=gnu11", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", f"-I{spank}")
    files = (str(Path(__file__).with_name("bind.c")), str(spank / "devices.c"))
    subprocess.run(["cc", *flags, "-o", str(made), *files], check=True)
    return made


def tell(program: Path, folder: Path, number: int = 7) -> tuple[int, str]:
    tool = ("valgrind", "-q", "--error-exitcode=99") if shutil.which("valgrind") is not None else ()
    done = subprocess.run(
        [*tool, program, folder, str(number)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, _, rest = done.stdout.strip().partition(" ")
    return int(found), rest


@pytest.fixture
def channels(tmp_path: Path) -> Channels:
    made = Channels(tmp_path / "run")
    made.open(7, os.getuid())
    return made


def test_a_task_gets_what_the_agent_has_written(program: Path, channels: Channels) -> None:
    assert tell(program, channels.folder, 8) == (NO_SHARER, "[] []")
    channels.go_through(7, Path("/run/nvidia-mps"))
    assert tell(program, channels.folder) == (TOO_LATE, "[] []"), "the devices come last"
    channels.bind(7, (0, 3))
    assert tell(program, channels.folder) == (BOUND, "[0,3] [/run/nvidia-mps]")
    channels.go_through(7, None)
    assert tell(program, channels.folder) == (BOUND, "[0,3] []")


@pytest.mark.parametrize("text", ["", "\n", "/" + 300 * "x"])
def test_without_a_folder_that_can_be_the_task_runs_without_mps(program: Path, channels: Channels, text: str) -> None:
    channels.bind(7, (0,))
    (channels.folder / "7" / "mps").write_text(text)
    assert tell(program, channels.folder) == (BOUND, "[0] []")


def test_the_longest_folder_fits(program: Path, channels: Channels) -> None:
    longest = Path("/" + 253 * "x")
    channels.go_through(7, longest)
    channels.bind(7, (0,))
    assert tell(program, channels.folder) == (BOUND, f"[0] [{longest}]")


@pytest.mark.parametrize("text", ["", "\n", "0;1", "all", "0," * 200])
def test_devices_that_cannot_be_bind_to_none(program: Path, channels: Channels, text: str) -> None:
    (channels.folder / "7" / "devices").write_text(text)
    assert tell(program, channels.folder) == (NOT_OURS, "[] []")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["mps", "devices"])
def test_files_of_others_do_not_count(program: Path, channels: Channels, name: str) -> None:
    channels.go_through(7, Path("/run/nvidia-mps"))
    channels.bind(7, (0,))
    os.chown(channels.folder / "7" / name, 65534, 65534)
    assert tell(program, channels.folder) == ((BOUND, "[0] []") if name == "mps" else (NOT_OURS, "[] []"))
