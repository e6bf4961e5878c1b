"""Limits with which a job begins: the variables of its tasks, and what it is told later. A file stands in for HAMi-core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_profiles.node_channel import limits_file
from penstock_scheduler.model import JobId, Limit, Pack
from penstock_slurm.agent import limits
from penstock_slurm.agent.settings import AgentSettings

from .node import Node, alone, control

LIBRARY = b"\x7fELF" + bytes(60) + limits.MARK + b"\0"


def pack(*numbers: int, guaranteed: int | None = None, memory_mb: tuple[int, ...] = ()) -> Pack:
    jobs = tuple(JobId(f"j{number}") for number in numbers)
    first = JobId(f"j{guaranteed}") if guaranteed is not None else None
    return Pack(jobs, guaranteed=first, limits=tuple(Limit(memory_mb=mb) for mb in memory_mb))


@pytest.fixture
def limiter(tmp_path: Path) -> Path:
    path = tmp_path / "libvgpu.so"
    path.write_bytes(LIBRARY)
    path.chmod(0o755)
    return path


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(**settings: object) -> Node:
        # Nobody answers here, so the jobs beside one that begins are not waited for.
        made.append(Node(tmp_path, suspend_wait_s=0.01, **settings))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def mps_dir(tmp_path: Path) -> str:
    """The folder of a control daemon that answers."""
    folder = tmp_path / "mps"
    folder.mkdir()
    os.mkfifo(folder / "control")
    return str(folder)


def begin(node: Node, *packs: Pack, gpus: int = 1, **more: object) -> None:
    node.order(packs, tuple(range(gpus)), 60.0, **more)  # type: ignore[arg-type]
    for _ in range(5):  # on a busy machine a tick may take as long as all of them
        node.run(0.04)


def variables(node: Node, number: int) -> dict[str, str]:
    path = limits_file(node.run_dir, number)
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_an_opportunistic_client_of_mps_begins_with_a_part_of_the_multiprocessors(
    make_node: Callable[..., Node], mps_dir: str
):
    """The guaranteed job has the rest whatever the other one does. Jobs of a pack without a guaranteed job have all."""
    node = make_node(mps_dir=mps_dir)
    begin(node, pack(1, 2, guaranteed=1), pack(3, 4), gpus=2)
    assert variables(node, 1) == {}
    assert variables(node, 2) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}
    assert variables(node, 3) == variables(node, 4) == {}


def test_a_client_of_mps_begins_with_its_memory_limit_on_each_gpu(make_node: Callable[..., Node], mps_dir: str):
    node = make_node(mps_dir=mps_dir, mps_percentage=35)
    begin(node, pack(3), pack(1, 2, guaranteed=1, memory_mb=(0, 2000)), gpus=2)
    assert node.devices()["j2"] == (1,)
    assert variables(node, 2) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "35",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2000M,1=2000M",
    }
    assert variables(node, 1) == {}, "a guaranteed job has the memory that it needs"


def test_without_mps_a_job_of_a_pack_preloads_the_limiter(make_node: Callable[..., Node], limiter: Path):
    node = make_node(limiter=str(limiter))
    begin(node, pack(1, 2, memory_mb=(3000, 2000)))
    assert variables(node, 2) == {
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(node.run_dir / "2" / "job" / "limiter.cache"),
        "CUDA_DEVICE_MEMORY_LIMIT": "2000m",
        "LD_PRELOAD": str(limiter),
    }
    assert variables(node, 1)["CUDA_DEVICE_MEMORY_LIMIT"] == "3000m"
    assert (
        variables(node, 1)["CUDA_DEVICE_MEMORY_SHARED_CACHE"] != variables(node, 2)["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    )


def test_a_job_that_begins_alone_or_is_guaranteed_has_no_limit_that_holds(
    make_node: Callable[..., Node], limiter: Path
):
    """It must be able to use the whole GPU later."""
    node = make_node(limiter=str(limiter))
    begin(node, pack(1))
    begin(node, pack(1, 2, guaranteed=1, memory_mb=(0, 2000)))
    assert variables(node, 1) == {}
    assert variables(node, 2)["CUDA_DEVICE_MEMORY_LIMIT"] == "2000m"
    assert node.agent.state.jobs[JobId("j1")].most_mb == 0


def test_a_job_is_not_told_that_it_may_use_more_than_it_began_with(make_node: Callable[..., Node], limiter: Path):
    """The allocation would fail. A lower limit counts as without a limiter."""
    node = make_node(limiter=str(limiter))
    node.job(1)
    for limit_mb, told_mb in ((2000, 2000), (1500, 1500), (2500, 2000)):
        node.order([pack(1, 2, guaranteed=1, memory_mb=(0, limit_mb))], (0,), 60.0)
        node.run(0.2)
        node.until(lambda mb=told_mb: control(node, 2).memory_mb >= mb, "a limit")  # raised once the other one answers
        assert control(node, 2).memory_mb == told_mb
    node.start()  # an agent that starts again knows it
    begin(node, *alone(2))
    assert control(node, 2).memory_mb == 2000, "alone, too: its processes are the same"


def test_the_next_run_begins_with_other_limits_and_a_count_of_its_own(make_node: Callable[..., Node], limiter: Path):
    node = make_node(limiter=str(limiter))
    begin(node, pack(1, 2, memory_mb=(3000, 2000)))
    cache = Path(variables(node, 2)["CUDA_DEVICE_MEMORY_SHARED_CACHE"])
    cache.write_bytes(b"of the first run")
    begin(node, pack(1, 2, memory_mb=(3000, 4000)), running=[1])
    begin(node, pack(1, 2, memory_mb=(3000, 4000)))
    assert variables(node, 2)["CUDA_DEVICE_MEMORY_LIMIT"] == "4000m"
    assert not cache.exists()
    begin(node, pack(1, 2, memory_mb=(3000, 4000)), running=[1])
    begin(node, *alone(2))
    assert variables(node, 2) == {}
    assert control(node, 2).memory_mb == 0


def test_without_the_limiter_jobs_run_without_it_and_the_status_says_so(
    make_node: Callable[..., Node], limiter: Path, caplog: pytest.LogCaptureFixture
):
    limiter.unlink()
    node = make_node(limiter=str(limiter))
    begin(node, pack(1, 2, memory_mb=(3000, 2000)))
    assert variables(node, 1) == variables(node, 2) == {}
    assert node.states() == {"j1": "running", "j2": "running"}
    assert node.agent.status().lacks == ("no-limiter",)
    (record,) = [record for record in caplog.records if record.getMessage() == "the node lacks what sharing needs"]
    assert f"{limiter}: No such file or directory" in record.__dict__["text"]
    assert control(node, 2).memory_mb == 2000, "it is told its limit, and watched"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (LIBRARY, 0o755, ""),
        (LIBRARY, 0o775, "others than root can change"),
        (LIBRARY, 0o757, "others than root can change"),
        (b"\x7fELF" + bytes(100), 0o755, "is not HAMi-core's libvgpu.so"),
        (limits.MARK, 0o755, "is not HAMi-core's libvgpu.so"),
        (b"", 0o755, "cannot mmap an empty file"),
    ],
)
def test_a_library_that_jobs_may_preload(limiter: Path, content: bytes, mode: int, words: str):
    limiter.write_bytes(content)
    limiter.chmod(mode)
    found = limits.trouble(str(limiter))
    assert words in found if words else found == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_library_of_another_user_is_not_preloaded(limiter: Path):
    os.chown(limiter, 65534, 65534)
    assert "others than root can change" in limits.trouble(str(limiter))


def test_a_link_to_the_library_counts_as_the_library(limiter: Path):
    link = limiter.with_name("link.so")
    link.symlink_to(limiter)
    assert limits.trouble(str(link)) == ""
    assert "is not a regular file" in limits.trouble(str(limiter.parent))


@pytest.mark.parametrize("path", ["lib/libvgpu.so", "/opt/a b/libvgpu.so", "/opt/a:b/libvgpu.so", "/" + 200 * "x"])
def test_paths_that_cannot_be_preloaded(path: str):
    with pytest.raises(ValidationError):
        AgentSettings(limiter=path)
