"""How the SPANK plugin reads the agent's files, without Slurm, and under valgrind if that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock_slurm.agent import limits
from penstock_slurm.agent.channel import Channels
from penstock_slurm.install.units import source

from .cgroups import Slurm, give

NO_SHARER, BOUND, TOO_LATE, DENIED, NOT_OURS = range(5)


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


def tell_all(program: Path, folder: Path, *numbers: int, cgroup: Path | None = None) -> list[tuple[int, str]]:
    """The plugin's output for each of these jobs."""
    tool = ("valgrind", "-q", "--error-exitcode=99") if shutil.which("valgrind") is not None else ()
    inside = ("sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', cgroup) if cgroup is not None else ()
    command = [*inside, *tool, program, folder, "1", *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert len(lines) == len(numbers)
    return [(int(found), rest) for found, _, rest in lines]


def tell(program: Path, folder: Path, number: int = 7, cgroup: Path | None = None) -> tuple[int, str]:
    (found,) = tell_all(program, folder, number, cgroup=cgroup)
    return found


def write(channels: Channels, name: str, texts: Sequence[str]) -> range:
    """Make jobs with these texts in their files of this name. Returns their numbers."""
    numbers = range(7, 7 + len(texts))
    for number, text in zip(numbers, texts, strict=True):
        channels.open(number, os.getuid())
        (channels.folder / str(number) / name).write_text(text)
    return numbers


@pytest.fixture
def channels(tmp_path: Path) -> Channels:
    made = Channels(tmp_path / "run")
    made.open(7, os.getuid())
    return made


def test_a_task_gets_what_the_agent_has_written(program: Path, channels: Channels) -> None:
    assert tell(program, channels.folder, 8) == (NO_SHARER, "[] []")
    channels.go_through(7, Path("/run/nvidia-mps"))
    assert tell(program, channels.folder) == (TOO_LATE, "[] []"), "the devices are written last"
    channels.bind(7, (0, 3))
    assert tell(program, channels.folder) == (BOUND, "[0,3] [/run/nvidia-mps]")
    channels.go_through(7, None)
    assert tell(program, channels.folder) == (BOUND, "[0,3] []")


def test_without_a_folder_that_can_be_the_task_runs_without_mps(program: Path, channels: Channels) -> None:
    numbers = write(channels, "mps", ["", "\n", "/" + 300 * "x"])
    for number in numbers:
        channels.bind(number, (0,))
    assert tell_all(program, channels.folder, *numbers) == [(BOUND, "[0] []")] * len(numbers)


def test_a_task_gets_the_variables_that_limit_its_job(program: Path, channels: Channels) -> None:
    channels.limit(7, {"A": "0=1M,1=1M", "B": "2"})
    channels.bind(7, (0,))
    assert tell(program, channels.folder) == (BOUND, "[0] []A=0=1M,1=1M B=2")
    channels.limit(7, {})
    assert tell(program, channels.folder) == (BOUND, "[0] []")


def test_a_task_whose_limits_cannot_be_read_sees_no_gpu(program: Path, channels: Channels) -> None:
    """It could take what belongs to the jobs beside it."""
    numbers = write(channels, "limits", ["", 1100 * "x"])
    for number in numbers:
        channels.bind(number, (0,))
    assert tell_all(program, channels.folder, *numbers) == [(NOT_OURS, "[] []")] * len(numbers)


def test_the_most_limits_fit(program: Path, channels: Channels) -> None:
    """Sixteen GPUs as a client of MPS; the longest path of a limiter and of its file."""
    clients = limits.by_mps(1_000_000, 20, 16)
    longest = limits.by_limiter("/" + (limits.LONGEST - 1) * "x", 1_000_000, Path("/" + 253 * "y"))
    for variables in (clients, longest):
        channels.limit(7, variables)
        channels.bind(7, (0,))
        lines = " ".join(f"{name}={value}" for name, value in variables.items())
        assert tell(program, channels.folder) == (BOUND, f"[0] []{lines}")


def test_the_longest_folder_fits(program: Path, channels: Channels) -> None:
    longest = Path("/" + 253 * "x")
    channels.go_through(7, longest)
    channels.bind(7, (0,))
    assert tell(program, channels.folder) == (BOUND, f"[0] [{longest}]")


def test_devices_that_cannot_be_bind_to_none(program: Path, channels: Channels) -> None:
    numbers = write(channels, "devices", ["", "\n", "0;1", "all", "0," * 200])
    assert tell_all(program, channels.folder, *numbers) == [(NOT_OURS, "[] []")] * len(numbers)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["mps", "devices", "limits"])
def test_files_of_others_do_not_count(program: Path, channels: Channels, name: str) -> None:
    channels.limit(7, {"A": "1"} if name == "limits" else {})
    channels.go_through(7, Path("/run/nvidia-mps"))
    channels.bind(7, (0,))
    os.chown(channels.folder / "7" / name, 65534, 65534)
    assert tell(program, channels.folder) == ((BOUND, "[0] []") if name == "mps" else (NOT_OURS, "[] []"))


def test_a_task_waits_until_its_gpus_are_open_to_it_and_counts_those_that_it_sees(
    program: Path, channels: Channels, slurm: Slurm
) -> None:
    """CUDA counts only the GPUs that it can open."""
    (task,) = slurm.step("0", tasks=1)
    cgroups = slurm.cgroups()
    channels.bind(7, (0, 2), slurm.gpus)
    assert tell(program, channels.folder, cgroup=task) == (DENIED, "[] []")
    give(cgroups, (0,), 0.0)
    assert tell(program, channels.folder, cgroup=task) == (DENIED, "[] []"), "one of them is not"
    give(cgroups, (0, 2), 0.0)
    assert tell(program, channels.folder, cgroup=task) == (BOUND, "[0,1] []")
    assert tell(program, channels.folder) == (BOUND, "[0,2] []"), "if nothing is denied, they are Slurm's indexes"
    channels.go_through(7, Path("/run/nvidia-mps"))
    assert tell(program, channels.folder, cgroup=task) == (BOUND, "[0,2] [/run/nvidia-mps]"), "the daemon counts all"


def test_a_gpu_without_a_file_is_not_counted_where_gpus_are_denied(
    program: Path, channels: Channels, slurm: Slurm
) -> None:
    (task,) = slurm.step("0", tasks=1)
    slurm.gpus[0].unlink()
    channels.bind(7, (2,), slurm.gpus)
    assert give(slurm.cgroups(), (2,), 0.0) == ""
    assert tell(program, channels.folder, cgroup=task) == (BOUND, "[0] []")
    assert tell(program, channels.folder) == (BOUND, "[2] []")


def test_a_task_that_waits_goes_on_when_they_are_opened(program: Path, channels: Channels, slurm: Slurm) -> None:
    (task,) = slurm.step("0", tasks=1)
    channels.bind(7, (2,), slurm.gpus)
    waits = ("sh", "-c", 'echo $$ >"$0/cgroup.procs"; echo; exec "$@"', task, program, channels.folder, "6000", "7")
    with subprocess.Popen(waits, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)  # it reads the file first
        give(slurm.cgroups(), (2,), 0.0)
        assert process.stdout.readline() == f"{BOUND} [0] []\n"


def test_without_files_that_are_denied_a_task_is_bound_as_the_agent_says(program: Path, channels: Channels) -> None:
    numbers = write(channels, "gpus", ["", "\n", "/nowhere/gpu0\n", 5000 * "x"])
    for number in numbers:
        channels.bind(number, (0, 3))
    assert tell_all(program, channels.folder, *numbers) == [(BOUND, "[0,3] []")] * len(numbers)
