"""Host memory that the limits of cgroups leave to a process."""

from pathlib import Path

from penstock_slurm.agent.cuda_checkpoints import room_mb


def test_room_on_the_host_is_what_the_limits_around_a_process_leave(tmp_path: Path):
    """1000 MB of 4096 in use, 200 of them cached files: 3296 left; the cgroup around it leaves 2000."""
    mib, job = 2**20, tmp_path / "cgroup/system.slice/slurmstepd.scope/job_7"
    step = job / "step_0/user"
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user\n")
    step.mkdir(parents=True)

    def room() -> float:
        return room_mb(5, tmp_path / "proc", tmp_path / "cgroup")

    assert room() == float("inf")
    (step / "memory.max").write_text(f"{4096 * mib}\n")
    (step / "memory.current").write_text(f"{1000 * mib}\n")
    (step / "memory.stat").write_text(f"anon 5\ninactive_file {200 * mib}\n")
    assert room() == 3296
    (job / "memory.max").write_text(f"{3000 * mib}\n")
    (job / "memory.current").write_text(f"{1000 * mib}\n")
    assert room() == 2000
    (job / "memory.max").write_text("max\n")
    assert room() == 3296
    v1 = tmp_path / "cgroup/memory/slurm/uid_1/job_7"
    v1.mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text("9:memory:/slurm/uid_1/job_7\n0::/\n")
    (v1 / "memory.limit_in_bytes").write_text(f"{100 * mib}\n")
    (v1 / "memory.usage_in_bytes").write_text(f"{60 * mib}\n")
    assert room() == 40
