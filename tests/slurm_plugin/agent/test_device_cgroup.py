"""Device cgroups of jobs, in both versions of cgroups."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Collection
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_slurm.agent import bpf, device_cgroup
from penstock_slurm.agent.device_cgroup import CHANGES_S, LEVELS, SELDOM_S, DeviceCgroups, Rule
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.install.units import CONSTRAINED

from .cgroups import BOUNDS, GPUS, JOB, NODE, UID, Slurm, capabilities, give, run_with


def test_a_job_reaches_the_gpus_that_it_is_bound_to_and_no_others(slurm: Slurm) -> None:
    processes = [slurm.inside(folder) for folder in (*slurm.step("batch"), *slurm.step("0", tasks=2))]
    cgroups = slurm.cgroups()
    assert [slurm.sees(each) for each in processes] == [set()] * 3
    assert give(cgroups, (1,), 0.0) == ""
    assert [slurm.sees(each) for each in processes] == [{1}] * 3
    assert give(cgroups, (0, 2), 0.5) == "", "it continues on others"
    assert [slurm.sees(each) for each in processes] == [{0, 2}] * 3
    assert give(slurm.cgroups(), (2,), 1.0) == "", "another agent, without this one's state"
    assert [slurm.sees(each) for each in processes] == [{2}] * 3
    assert cgroups.trouble() == ""


def test_a_step_that_begins_later_reaches_them_too(slurm: Slurm) -> None:
    """Slurm denies the GPUs in the job's cgroup again each time a step begins."""
    first = slurm.inside(*slurm.step("batch"))
    cgroups = slurm.cgroups()
    give(cgroups, (1,), 0.0)
    later_s = 2 * CHANGES_S
    give(cgroups, (1,), later_s)
    second = slurm.inside(*slurm.step("0", tasks=1))
    assert (slurm.sees(first), slurm.sees(second)) == (set(), set())
    give(cgroups, (1,), later_s + 0.5)
    assert (slurm.sees(first), slurm.sees(second)) == ({1}, {1})
    third = slurm.inside(slurm.task(slurm.job / "step_0" / ("user" if slurm.version == 2 else ""), 1))
    assert slurm.sees(third) == set()
    give(cgroups, (1,), later_s + 1.0)
    assert slurm.sees(third) == {1}, "Slurm makes the tasks' cgroups after the step's, and denies the GPUs afterwards"


def test_what_is_denied_later_is_opened_some_time_later(slurm: Slurm) -> None:
    (folder,) = slurm.step("0", tasks=1)
    process, cgroups = slurm.inside(folder), slurm.cgroups()
    give(cgroups, (1,), 0.0)
    give(cgroups, (1,), CHANGES_S)
    slurm._deny(folder, override=False)
    give(cgroups, (1,), CHANGES_S + SELDOM_S / 2)
    assert slurm.sees(process) == set(), "not all cgroups are checked in each tick"
    give(cgroups, (1,), CHANGES_S + SELDOM_S)
    assert slurm.sees(process) == {1}


def test_the_cgroups_of_other_jobs_and_of_nodes_that_have_not_this_name_are_left_alone(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    cgroups = slurm.cgroups()
    assert give(cgroups, (1,), 0.0, JOB + 1) == ""
    elsewhere = DeviceCgroups("n2", lambda: True, slurm.pattern, slurm.mount)
    assert give(elsewhere, (1,), 0.0) == ""
    assert slurm.sees(process) == set()


def test_where_slurm_denies_nothing_nothing_is_done(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    unconstrained = DeviceCgroups(NODE, lambda: False, "/nowhere/gpu[0-2]", slurm.mount)
    assert (give(unconstrained, (1,), 0.0), unconstrained.trouble()) == ("", "")
    assert slurm.sees(process) == set()


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_without_programs_of_slurms_none_of_ours_are_attached(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1, constrains=False))
    give(slurm.cgroups(), (1,), 0.0)
    assert slurm.sees(process) == {0, 1, 2}
    nowhere = DeviceCgroups(NODE, lambda: True, "/nowhere/gpu[0-2]", slurm.mount)
    assert give(nowhere, (1,), 0.0) == "", "and no file is missing"


def test_what_keeps_gpus_from_being_opened_is_told(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    cgroups = slurm.cgroups()
    assert "no device file of GPU 3" in give(cgroups, (0, 3), 0.0)
    assert "no device file of GPU 3" in cgroups.trouble()
    assert slurm.sees(process) == set()
    assert give(cgroups, (0,), 0.1) == cgroups.trouble() == ""
    give(cgroups, (3,), 0.2)
    cgroups.forget_all_but([])
    assert cgroups.trouble() == "", "the job has ended"
    nowhere = DeviceCgroups(NODE, lambda: True, f"{slurm.mount}/none[0-7]", slurm.mount)
    assert f"No such file or directory: '{slurm.mount}/none0'" in nowhere.trouble()
    slurm.gpus[1].unlink()
    slurm.gpus[1].touch()
    assert f"No such device: '{slurm.gpus[1]}'" in give(slurm.cgroups(), (1,), 0.3)


def test_a_gpu_that_is_not_slurms_is_denied_as_well(slurm: Slurm) -> None:
    """`File=/dev/nvidia[1-2]`: Slurm's first GPU is the node's second. Slurm denies all, and Penstock's program replaces
    Slurm's."""
    process = slurm.inside(*slurm.step("0", tasks=1))
    some = DeviceCgroups(NODE, lambda: True, slurm.pattern.replace("[0-", "[1-"), slurm.mount)
    assert give(some, (0,), 0.0) == ""
    assert slurm.sees(process) == {1}
    assert "no device file of GPU 2" in give(some, (2,), 0.1)


def test_a_gpu_whose_file_is_made_later_is_denied_as_well(slurm: Slurm, tmp_path: Path) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    later = slurm.gpus[2].rename(tmp_path / "later")
    cgroups = slurm.cgroups()
    assert give(cgroups, (1,), 0.0) == "", "no job is bound to that GPU"
    later.rename(slurm.gpus[2])
    assert give(cgroups, (1,), 0.5) == ""
    assert slurm.sees(process) == {1}


def test_a_gpu_without_a_device_file_is_denied_as_well(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    major, minor = GPUS[2]
    monkeypatch.setattr(device_cgroup, "NVIDIA", major)
    in_driver(tmp_path / "driver", {"0000:07:00.0": minor})
    elsewhere = slurm.gpus[2].rename(tmp_path / "elsewhere")
    assert give(slurm.cgroups(driver=tmp_path / "driver"), (1,), 0.0) == ""
    assert (process.opens(slurm.gpus[1]), process.opens(elsewhere)) == (0, errno.EPERM)


def test_cgroups_that_users_make_are_not_checked(slurm: Slurm) -> None:
    """In Slurm 22.05, they have the cgroups of their jobs."""
    (task,) = slurm.step("0", tasks=1)
    own = [task.parent / "own", slurm.job / "own"]
    for folder in own:
        folder.mkdir()
        slurm._deny(folder)
    assert give(slurm.cgroups(), (1,), 0.0) == ""
    assert [slurm.sees(slurm.inside(folder)) for folder in own] == [set()] * 2


def test_only_a_limited_number_of_cgroups_of_a_job_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(9):
        for task in range(9):
            (tmp_path / f"step_{step}" / f"task_{task}").mkdir(parents=True)
    assert len(device_cgroup.slurm_cgroups(str(tmp_path), LEVELS[1])) == 90
    monkeypatch.setattr(device_cgroup, "MOST_CGROUPS", 20)
    found = device_cgroup.slurm_cgroups(str(tmp_path), LEVELS[1])
    assert (len(found), sum("task_" in path for path in found)) == (20, 11)


def test_another_run_of_the_job_is_left_alone(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    cgroups = slurm.cgroups()
    first = cgroups.cgroup(JOB, UID)
    assert first is not None
    slurm.end_job()
    assert cgroups.cgroup(JOB, UID) is None
    process = slurm.inside(*slurm.step("0", tasks=1))
    assert cgroups.cgroup(JOB, UID) not in (None, first)
    for now_s in (0.0, 60.0):
        assert cgroups.give(JOB, UID, (1,), now_s, first) == ""
        assert slurm.sees(process) == set()


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Opens GPUs in cgroups of this name."""
    write, replace = device_cgroup.write_rules, bpf.Programs.replace

    def fail(folder: str) -> None:
        if folder.endswith(name):
            raise OSError(number, os.strerror(number), folder)

    def write_or_fail(path: str, rules: Collection[Rule]) -> None:
        fail(path.rpartition("/")[0])
        write(path, rules)

    def replace_or_fail(self: bpf.Programs, folder: str, denied: frozenset[Rule]) -> None:
        fail(folder)
        replace(self, folder, denied)

    monkeypatch.setattr(device_cgroup, "write_rules", write_or_fail)
    monkeypatch.setattr(bpf.Programs, "replace", replace_or_fail)


def test_what_fails_in_one_cgroup_keeps_no_other_from_it_and_is_told_if_it_lasts(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's cgroup cannot allow a device that Slurm has just denied in the job's cgroup again."""
    processes = [slurm.inside(folder) for folder in slurm.step("0", tasks=2)]
    cgroups = slurm.cgroups()
    give(cgroups, (0,), -60.0)
    give(cgroups, (0,), -10.0)
    with monkeypatch.context() as patch:
        failing(patch, "task_0", errno.EPERM)
        assert give(cgroups, (1,), 0.0) == cgroups.trouble() == ""
        assert slurm.sees(processes[1]) == {1}
        assert "Operation not permitted" in give(cgroups, (1,), 0.5)
        assert "Operation not permitted" in cgroups.trouble()
    assert give(cgroups, (1,), 1.0) == cgroups.trouble() == ""
    assert [slurm.sees(each) for each in processes] == [{1}] * 2


def test_what_fails_is_tried_again_at_once(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = slurm.step("0", tasks=1)
    process, cgroups = slurm.inside(folder), slurm.cgroups()
    give(cgroups, (1,), 0.0)
    slurm._deny(folder, override=False)
    with monkeypatch.context() as patch:
        failing(patch, "task_0", errno.EPERM)
        assert give(cgroups, (1,), 2 * CHANGES_S) == ""
    assert give(cgroups, (1,), 2 * CHANGES_S + 0.5) == ""
    assert slurm.sees(process) == {1}


def test_a_cgroup_that_ends_meanwhile_is_no_trouble(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [slurm.inside(folder) for folder in slurm.step("0", tasks=2)]
    cgroups = slurm.cgroups()
    failing(monkeypatch, "task_0", errno.ENODEV)
    assert [give(cgroups, (1,), now_s) for now_s in (0.0, 0.5, 1.0)] == [""] * 3
    assert slurm.sees(processes[1]) == {1}


def test_missing_cgroups_are_reported_once_a_job_needs_them(slurm: Slurm) -> None:
    elsewhere = DeviceCgroups("n2", lambda: True, slurm.pattern, slurm.mount)
    assert elsewhere.trouble() == "", "Slurm makes them with the first job"
    assert elsewhere.trouble(living=True) == f"there are no cgroups of Slurm in {slurm.mount}"
    assert slurm.cgroups().trouble(living=True) == ""


def test_a_node_without_a_gpu_lacks_nothing(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cgroup, "GPU_FILE", f"{tmp_path}/nvidia")
    none = DeviceCgroups(NODE, lambda: True, None, slurm.mount, tmp_path / "driver")
    assert none.trouble() == ""
    slurm.step("0", tasks=1)
    assert "no device file of GPU 1" in give(none, (1,), 0.0)


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_no_more_than_so_many_programs_are_kept_open(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    monkeypatch.setattr(bpf, "MOST_PROGRAMS", 2)
    cgroups, before = slurm.cgroups(), opened()
    for devices in ((0,), (1,), (2,), (0, 1), (1, 2), (0,), (2,)):
        assert give(cgroups, devices, 0.0) == ""
        assert slurm.sees(process) == set(devices)
    assert opened() - before == 2


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_a_program_that_cannot_be_used_is_closed(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, bpf.BPF_OBJ_GET_INFO_BY_FD)
    before = opened()
    assert "Operation not permitted" in slurm.cgroups().trouble()
    assert opened() == before


def refusing(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Like a kernel that needs one more capability."""
    call = bpf.bpf

    def call_or_fail(command: int, attribute: bytes, path: str = "bpf") -> tuple[int, bytes]:
        if command == refused:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        return call(command, attribute, path)

    monkeypatch.setattr(bpf, "bpf", call_or_fail)


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_that_programs_may_not_be_asked_for_is_found_out_without_a_job(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels before 6.7 need CAP_NET_ADMIN to query a program, but not to load one."""
    refusing(monkeypatch, bpf.BPF_PROG_QUERY)
    assert "Operation not permitted" in slurm.cgroups().trouble()


def test_the_kernel_has_room_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux 6.17 writes a query's revision at offset 56, even if the given size is smaller."""
    rooms = []

    class Libc:
        def syscall(self, _number: object, _command: object, buffer: ctypes.Array[ctypes.c_char], size: object) -> int:
            rooms.append(ctypes.sizeof(buffer))
            return 0

    monkeypatch.setattr(bpf, "LIBC", Libc())
    assert bpf.bpf(bpf.BPF_PROG_QUERY, b"abc") == (0, b"abc")
    assert rooms == [bpf.MOST_WRITTEN]
    assert rooms[0] >= 64


GIVE = """
import json, sys
from pathlib import Path
from penstock_slurm.agent.device_cgroup import DeviceCgroups
node, number, uid, pattern, mount = sys.argv[1:]
cgroups, job = DeviceCgroups(node, lambda: True, pattern, Path(mount)), (int(number), int(uid))
print(json.dumps([cgroups.trouble(), cgroups.give(*job, (1,), 0.0, cgroups.cgroup(*job)), cgroups.trouble()]))
"""


def give_with(slurm: Slurm, capabilities: str) -> list[str]:
    """The agent has only these capabilities."""
    said = run_with(capabilities, GIVE, NODE, str(JOB), str(UID), slurm.pattern, str(slurm.mount))
    found: list[str] = json.loads(said)
    return found


def test_what_the_agents_unit_leaves_it_is_enough_where_devices_are_constrained_and_only_there(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    found = give_with(slurm, capabilities())
    assert all("Operation not permitted" in text for text in found)
    assert slurm.sees(process) == set()
    assert give_with(slurm, CONSTRAINED[BOUNDS].removeprefix(BOUNDS) + capabilities()) == ["", "", ""]
    assert slurm.sees(process) == {1}


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_a_kernel_without_bpf_says_so(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.step("0", tasks=1)
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert os.strerror(errno.ENOSYS) in slurm.cgroups().trouble()
    assert os.strerror(errno.ENOSYS) in give(slurm.cgroups(), (1,), 0.0)


def in_driver(folder: Path, minors: dict[str, int]) -> None:
    for address, minor in minors.items():
        (folder / address).mkdir(parents=True)
        (folder / address / "information").write_text(
            f"Model: \t\t NVIDIA A100\nBus Location: \t {address}\nDevice Minor: \t {minor}\n"
        )


def test_gpus_are_found_by_their_place_on_the_bus_as_nvidia_counts_them(tmp_path: Path) -> None:
    """Minor numbers are in another order on some boards."""
    in_driver(tmp_path / "driver", {"0000:47:00.0": 0, "0000:07:00.0": 2, "0000:b7:00.0": 1})
    found = DeviceCgroups(NODE, lambda: True, None, tmp_path, tmp_path / "driver").gpus()
    assert found == (Path("/dev/nvidia2"), Path("/dev/nvidia0"), Path("/dev/nvidia1"))
    found = DeviceCgroups(
        NODE, lambda: True, f"{tmp_path}/gpu[1-2],{tmp_path}/gpu0", tmp_path, tmp_path / "driver"
    ).gpus()
    assert found == (tmp_path / "gpu1", tmp_path / "gpu2", tmp_path / "gpu0"), "the site sets another order"


def test_without_a_word_of_the_driver_they_are_the_files_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "GPU_FILE", f"{tmp_path}/nvidia")
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    found = DeviceCgroups(NODE, lambda: True, None, tmp_path, tmp_path / "driver").gpus()
    assert [path.name for path in found] == ["nvidia0", "nvidia2", "nvidia10"]


@pytest.mark.parametrize("pattern", ["nvidia[0-7]", "/dev/nvidia%d", "/dev/\nnvidia0", "/dev/nvidia[0-7", ""])
def test_patterns_that_cannot_be(pattern: str) -> None:
    with pytest.raises(ValidationError, match=r"must be absolute paths|not a host list"):
        AgentSettings(gpu_file=pattern)
