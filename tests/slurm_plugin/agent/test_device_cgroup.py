"""Which GPUs the processes of a job can open, in real cgroups that deny them all of the node, as Slurm's do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_profiles.node_channel import devices_file, gpus_file
from penstock_slurm.agent.device_cgroup import CHANGES_S, SELDOM_S, DeviceCgroups
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.install.sources import source
from penstock_slurm.install.units import AGENT, CONSTRAINED

from .cgroups import JOB, NODE, UID, Slurm
from .node import Node, alone


def test_a_job_reaches_the_gpus_that_it_is_bound_to_and_no_others(slurm: Slurm) -> None:
    processes = [slurm.inside(folder) for folder in (*slurm.step("batch"), *slurm.step("0", tasks=2))]
    cgroups = slurm.cgroups()
    assert [slurm.sees(each) for each in processes] == [set()] * 3
    assert cgroups.give(JOB, UID, (1,), 0.0) == ""
    assert [slurm.sees(each) for each in processes] == [{1}] * 3
    assert cgroups.give(JOB, UID, (0, 2), 0.5) == "", "it goes on on others"
    assert [slurm.sees(each) for each in processes] == [{0, 2}] * 3
    assert slurm.cgroups().give(JOB, UID, (2,), 1.0) == "", "another agent, which knows nothing of what this one did"
    assert [slurm.sees(each) for each in processes] == [{2}] * 3
    assert cgroups.trouble() == ""


def test_a_step_that_begins_later_reaches_them_too(slurm: Slurm) -> None:
    """Slurm denies them in the job's cgroup again when one begins."""
    first = slurm.inside(*slurm.step("batch"))
    cgroups = slurm.cgroups()
    cgroups.give(JOB, UID, (1,), 0.0)
    later_s = 2 * CHANGES_S
    cgroups.give(JOB, UID, (1,), later_s)
    second = slurm.inside(*slurm.step("0", tasks=1))
    assert (slurm.sees(first), slurm.sees(second)) == (set(), set())
    cgroups.give(JOB, UID, (1,), later_s + 0.5)
    assert (slurm.sees(first), slurm.sees(second)) == ({1}, {1})
    third = slurm.inside(slurm.task(slurm.job / "step_0" / ("user" if slurm.version == 2 else ""), 1))
    assert slurm.sees(third) == set()
    cgroups.give(JOB, UID, (1,), later_s + 1.0)
    assert slurm.sees(third) == {1}, "Slurm makes the tasks' cgroups after the step's, and denies after that"


def test_what_is_denied_later_is_opened_some_time_later(slurm: Slurm) -> None:
    (folder,) = slurm.step("0", tasks=1)
    process, cgroups = slurm.inside(folder), slurm.cgroups()
    cgroups.give(JOB, UID, (1,), 0.0)
    cgroups.give(JOB, UID, (1,), CHANGES_S)
    slurm._deny(folder, override=False)
    cgroups.give(JOB, UID, (1,), CHANGES_S + SELDOM_S / 2)
    assert slurm.sees(process) == set(), "not all is looked at in each turn"
    cgroups.give(JOB, UID, (1,), CHANGES_S + SELDOM_S)
    assert slurm.sees(process) == {1}


def test_the_cgroups_of_other_jobs_and_of_nodes_that_have_not_this_name_are_left_alone(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    cgroups = slurm.cgroups()
    assert cgroups.give(JOB + 1, UID, (1,), 0.0) == ""
    elsewhere = DeviceCgroups("n2", lambda: True, cgroups._gpu_file, slurm.mount)
    assert elsewhere.give(JOB, UID, (1,), 0.0) == ""
    assert slurm.sees(process) == set()


def test_where_slurm_denies_nothing_nothing_is_done(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    unconstrained = DeviceCgroups(NODE, lambda: False, "/nowhere/gpu%d", slurm.mount)
    assert (unconstrained.give(JOB, UID, (1,), 0.0), unconstrained.trouble()) == ("", "")
    assert slurm.sees(process) == set()


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_without_programs_of_slurms_none_of_ours_are_attached(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1, constrains=False))
    slurm.cgroups().give(JOB, UID, (1,), 0.0)
    assert slurm.sees(process) == {0, 1, 2}
    nowhere = DeviceCgroups(NODE, lambda: True, "/nowhere/gpu%d", slurm.mount)
    assert nowhere.give(JOB, UID, (1,), 0.0) == "", "nor is a file missed"


def test_what_keeps_gpus_from_being_opened_is_told(slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("0", tasks=1))
    cgroups = slurm.cgroups()
    assert "no device file of GPU 3" in cgroups.give(JOB, UID, (0, 3), 0.0)
    assert "no device file of GPU 3" in cgroups.trouble()
    assert slurm.sees(process) == set()
    assert cgroups.give(JOB, UID, (0,), 0.1) == cgroups.trouble() == ""
    cgroups.give(JOB, UID, (3,), 0.2)
    cgroups.forget_all_but([])
    assert cgroups.trouble() == "", "the job has gone"
    nowhere = DeviceCgroups(NODE, lambda: True, f"{slurm.mount}/none%d", slurm.mount)
    assert f"No such file or directory: '{slurm.mount}/none0'" in nowhere.trouble()
    slurm.gpus[1].unlink()
    slurm.gpus[1].touch()
    assert f"No such device: '{slurm.gpus[1]}'" in slurm.cgroups().trouble()


GIVE = """
import json, sys
from pathlib import Path
from penstock_slurm.agent.device_cgroup import DeviceCgroups
node, number, uid, pattern, mount = sys.argv[1:]
cgroups = DeviceCgroups(node, lambda: True, pattern, Path(mount))
print(json.dumps([cgroups.trouble(), cgroups.give(int(number), int(uid), (1,), 0.0), cgroups.trouble()]))
"""


def give_with(slurm: Slurm, capabilities: str) -> list[str]:
    """By an agent that has these alone."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed (Debian: util-linux)")
    bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())])
    pattern = str(slurm.gpus[0]).replace("gpu0", "gpu%d")
    program = [sys.executable, "-c", GIVE, NODE, str(JOB), str(UID), pattern, str(slurm.mount)]
    command = ["setpriv", f"--bounding-set={bounds}", "--inh-caps=-all", "--no-new-privs", *program]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    found: list[str] = json.loads(done.stdout)
    return found


def test_what_the_agents_unit_leaves_it_is_enough_where_devices_are_constrained_and_only_there(slurm: Slurm) -> None:
    (line,) = [
        line for line in (source("systemd") / AGENT).read_text().splitlines() if "CapabilityBoundingSet=" in line
    ]
    process = slurm.inside(*slurm.step("0", tasks=1))
    found = give_with(slurm, line.partition("=")[2])
    assert all("Operation not permitted" in text for text in found)
    assert slurm.sees(process) == set()
    key = "CapabilityBoundingSet="
    assert give_with(slurm, line.replace(key, CONSTRAINED[key]).partition("=")[2]) == ["", "", ""]
    assert slurm.sees(process) == {1}


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_a_kernel_without_bpf_says_so(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.step("0", tasks=1)
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert os.strerror(errno.ENOSYS) in slurm.cgroups().trouble()
    assert os.strerror(errno.ENOSYS) in slurm.cgroups().give(JOB, UID, (1,), 0.0)


def test_gpus_are_found_by_their_place_on_the_bus_as_nvidia_counts_them(tmp_path: Path) -> None:
    """Minor numbers are in another order on some boards."""
    for address, minor in (("0000:47:00.0", 0), ("0000:07:00.0", 2), ("0000:b7:00.0", 1)):
        folder = tmp_path / "driver" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA A100\nBus Location: \t {address}\nDevice Minor: \t {minor}\n"
        )
    found = DeviceCgroups(NODE, lambda: True, None, tmp_path, tmp_path / "driver").gpus()
    assert found == (Path("/dev/nvidia2"), Path("/dev/nvidia0"), Path("/dev/nvidia1"))
    for name in ("gpu0", "gpu1", "gpu3"):
        (tmp_path / name).touch()
    found = DeviceCgroups(NODE, lambda: True, f"{tmp_path}/gpu%d", tmp_path, tmp_path / "driver").gpus()
    assert found == (tmp_path / "gpu0", tmp_path / "gpu1"), "the site says otherwise"


@pytest.mark.parametrize("pattern", ["nvidia%d", "/dev/nvidia", "/dev/\n%d"])
def test_patterns_that_cannot_be(pattern: str) -> None:
    with pytest.raises(ValidationError, match="%d for the index"):
        AgentSettings(gpu_file=pattern)


# --- with the rest of the agent


@pytest.fixture
def node(tmp_path: Path, slurm: Slurm) -> Iterator[Node]:
    made = Node(tmp_path)
    made.device_cgroups = slurm.cgroups()
    made.start()
    yield made
    made.close()


def order(node: Node, *numbers: int, **fields: object) -> None:
    """On GPU 1, and a turn."""
    of_user = {number: {"uid": UID, **fields} for number in (JOB, JOB + 1)}
    node.order(alone(*numbers), (1,), 60.0, fields=of_user)
    node.agent.tick(time.time())


def test_who_has_a_turn_is_let_at_its_gpus_and_who_waits_is_not(node: Node, slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("batch"))
    order(node, JOB + 1, JOB)
    assert node.states() == {f"j{JOB + 1}": "running", f"j{JOB}": "waiting"}
    assert slurm.sees(process) == set()
    order(node, JOB)
    assert node.states() == {f"j{JOB}": "running"}
    assert slurm.sees(process) == {1}
    assert gpus_file(node.run_dir, JOB).read_text().splitlines() == [str(path) for path in slurm.gpus]
    step = slurm.inside(*slurm.step("0", tasks=1))
    node.agent.tick(time.time())
    assert slurm.sees(step) == {1}
    assert node.agent.status().lacks == ()


def test_a_job_that_the_daemon_names_no_more_keeps_them_as_it_begins_steps(node: Node, slurm: Slurm) -> None:
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    node.order([], ())
    node.agent.tick(time.time())
    assert JOB in node.agent._state.leaving
    step = slurm.inside(*slurm.step("0", tasks=1))
    node.agent.tick(time.time())
    assert slurm.sees(step) == {1}


def test_the_cgroups_of_a_job_with_gpus_of_slurms_are_slurms_matter(node: Node, slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("batch"))
    order(node, JOB, own_devices=(1,))
    assert node.states() == {f"j{JOB}": "running"}
    assert slurm.sees(process) == set()


def test_a_job_to_which_its_gpus_cannot_be_opened_is_not_bound_and_the_status_says_why(
    node: Node, slurm: Slurm, tmp_path: Path
) -> None:
    process = slurm.inside(*slurm.step("batch"))
    elsewhere = [path.rename(tmp_path / path.name) for path in slurm.gpus[1:]]
    order(node, JOB)
    assert node.states() == {f"j{JOB}": "waiting"}
    assert "its GPUs cannot be opened to it" in node.agent.status().jobs[0].why
    assert not devices_file(node.run_dir, JOB).exists()
    node.agent.tick(time.time() + 60)
    assert node.agent.status().lacks == ("no-devices",)
    for path, back in zip(elsewhere, slurm.gpus[1:], strict=True):
        path.rename(back)
    node.agent.tick(time.time() + 120)
    node.agent.tick(time.time() + 180)
    assert node.states() == {f"j{JOB}": "running"}
    assert node.agent.status().lacks == ()
    assert slurm.sees(process) == {1}
