"""A real Slurm in a folder: start, use, faults, repair and stop."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock_loopback import (
    CommandFailed,
    LoopbackCluster,
    LoopbackError,
    NotRunning,
    PortInUse,
    machine,
    processes,
    wait_for,
)
from penstock_loopback.fixtures import MakeLoopback
from penstock_loopback.folder import STATE_FILE
from tests.slurm_plugin.state import save_jobs

pytestmark = pytest.mark.slurm

DEAF_JOB = "#!/bin/bash\ntrap '' TERM\nenv -i sleep 300 &\nsleep 300\n"


def submit(on: LoopbackCluster, *options: str, script: str = "#!/bin/bash\nsleep 300\n") -> str:
    return on.command("sbatch", "--parsable", "-o/dev/null", *options, input=script).stdout.strip()


def running(on: LoopbackCluster, job: str) -> None:
    wait_for(lambda: on.command("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "RUNNING", 120, "it runs")


def sleeping() -> set[processes.Process]:
    """All `sleep 300` of this machine."""
    found = set()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if cmdline.read_bytes() == b"sleep\x00300\x00":
                found.add(processes.identify(int(cmdline.parent.name)))
    return found


def node_state(on: LoopbackCluster, node: str) -> str:
    return {status.name: status.state for status in on.status().nodes}[node]


@pytest.mark.parametrize(("gpu_type", "gpus"), [("t4", 4), ("rtx", 8), ("a100", 8)])
def test_a_job_gets_gpus_of_its_partitions_type(loopback: LoopbackCluster, gpu_type: str, gpus: int) -> None:
    done = loopback.command(
        *("srun", "-N2", "-p", gpu_type, f"--gres=gpu:{gpus}", "bash", "-c"),
        "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES",
    )
    indices = ",".join(str(index) for index in range(gpus))
    assert sorted(done.stdout.splitlines()) == [f"{gpu_type}-00 {indices}", f"{gpu_type}-01 {indices}"]


def test_status_counts_the_gpus_in_use(loopback: LoopbackCluster) -> None:
    running(loopback, submit(loopback, "-p", "rtx", "-w", "rtx-01", "--gres=gpu:3"))
    nodes = {node.name: node for node in loopback.status().nodes}
    assert (nodes["rtx-01"].gpus_used, nodes["rtx-01"].gpus, nodes["rtx-01"].state) == (3, 8, "mixed")
    assert sum(node.gpus_used for node in nodes.values()) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_each_test_finds_the_cluster_idle(loopback: LoopbackCluster, count: int) -> None:
    """The second of the two tests finds nothing of the first, in either order."""
    status = loopback.status()
    assert status.dead_daemons == ()
    assert {node.state for node in status.nodes} == {"idle"}
    assert loopback.command("squeue", "-h").stdout == ""
    for _ in range(count):
        submit(loopback, "--array=0-2", "-N2")
    loopback.command("scontrol", "update", "NodeName=a100-00", "State=DRAIN", "Reason=test")
    loopback.kill_slurmctld()


def test_a_failed_command_says_why(loopback: LoopbackCluster) -> None:
    with pytest.raises(CommandFailed, match="Invalid job id") as caught:
        loopback.command("scontrol", "show", "job", "4000000")
    assert caught.value.returncode == 1
    assert loopback.command("scontrol", "show", "job", "4000000", check=False).returncode == 1


def test_a_command_that_hangs_is_given_up(loopback: LoopbackCluster) -> None:
    with pytest.raises(LoopbackError, match=r"no answer within 0\.5 s"):
        loopback.command("srun", "sleep", "60", timeout_s=0.5)


def test_outer_slurm_variables_do_not_mislead(loopback: LoopbackCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    assert submit(loopback).isdigit()


def test_running_jobs_outlive_the_controller(make_loopback: MakeLoopback) -> None:
    broken = make_loopback()
    job = submit(broken)
    running(broken, job)
    save_jobs(broken, job)
    broken.kill_slurmctld()
    assert broken.status().dead_daemons == ("slurmctld",)
    assert node_state(broken, "t4-00") == "unknown"
    broken.start_slurmctld()
    running(broken, job)


def test_steps_outlive_their_slurmd(make_loopback: MakeLoopback) -> None:
    broken = make_loopback(slurmd_timeout_s=8)
    sbatch = ("sbatch", "--parsable", "-o/dev/null", "--no-requeue", "--wrap=exec sleep 300")
    running(broken, broken.command(*sbatch).stdout.strip())

    def found() -> set[processes.Process]:
        """The step, once it has existed for a second: the controller shows a job as running earlier, and slurmd still forks
        then."""
        steps = processes.find_steps(broken.folder)
        time.sleep(1.0)
        return steps if len(steps) == 1 and steps == processes.find_steps(broken.folder) else set()

    steps = wait_for(found, 120, "the step is there")
    conf = broken.slurm_conf.read_text()
    broken.stop_slurmctld()  # `scontrol reconfigure` of Slurm 24.11 and later would begin new slurmds, too
    quick = conf.replace("MessageTimeout=10", "MessageTimeout=2")  # of each ping, and of its repetitions
    broken.slurm_conf.write_text(quick)
    broken.start_slurmctld()
    broken.slurm_conf.write_text(conf)  # commands may wait longer
    broken.kill_slurmd("t4-00")
    assert processes.find_steps(broken.folder) == steps
    wait_for(lambda: node_state(broken, "t4-00").startswith("down"), 120, "Slurm considers the node down")
    broken.start_slurmd("t4-00")
    broken.reset()


def test_without_munged_no_command_works(make_loopback: MakeLoopback) -> None:
    broken = make_loopback()
    broken.stop_munged()
    assert "Munge" in broken.command("squeue", check=False).stderr
    broken.start_munged()
    broken.command("squeue")


def test_a_node_that_is_not_there_is_named(loopback: LoopbackCluster) -> None:
    with pytest.raises(LoopbackError, match="no node 't4-99'; the nodes are t4-00, t4-01"):
        loopback.kill_slurmd("t4-99")


def test_down_leaves_no_process(make_loopback: MakeLoopback) -> None:
    """Not even of a job that ignores SIGTERM, has a child that hides its environment, and has lost its slurmd."""
    doomed = make_loopback("t4:2x4")
    job = submit(doomed, "-w", "t4-00", script=DEAF_JOB)
    running(doomed, job)
    wait_for(lambda: len(doomed.processes() & sleeping()) == 2, 120, "the script has its two children")
    found = doomed.processes()
    doomed.kill_slurmd("t4-00")
    doomed.down()
    assert not any(processes.alive(process) for process in found)
    assert doomed.processes() == set()
    with pytest.raises(NotRunning):
        LoopbackCluster.open(doomed.folder)
    doomed.down()  # again is no error
    doomed.up()
    assert doomed.command("squeue", "-h").stdout == ""


def test_another_process_finds_it_and_takes_it_down(make_loopback: MakeLoopback) -> None:
    started = make_loopback("t4:1x4,rtx:1x8")
    found = LoopbackCluster.open(started.folder)
    assert (found.nodes, found.environment()) == (started.nodes, started.environment())
    assert found.processes() == started.processes()
    found.down()
    assert started.processes() == set()


def test_several_run_side_by_side(make_loopback: MakeLoopback) -> None:
    one, other = make_loopback("t4:1x4"), make_loopback("a100:2x8")
    submit(one)
    assert other.command("squeue", "-h").stdout == ""
    other.down()
    assert node_state(one, "t4-00") in ("idle", "mixed")


def test_a_cluster_lives_in_a_folder_too_long_for_sockets(tmp_path: Path) -> None:
    with LoopbackCluster(tmp_path / ("long" * 30), "t4:1x4") as long:
        assert long.command("srun", "--gres=gpu:1", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "0\n"
        short = Path(json.loads((long.folder / STATE_FILE).read_text())["short"])
        assert short.exists()
        assert LoopbackCluster.open(long.folder).command("squeue").returncode == 0
    assert not short.exists()


def test_settings_and_files_go_beside_the_defaults(make_loopback: MakeLoopback) -> None:
    lua = (
        'function slurm_job_submit(job, partitions, uid)\n  slurm.log_user("hello from lua")\n  return slurm.SUCCESS\nend\n'
        "function slurm_job_modify(job, record, partitions, uid)\n  return slurm.SUCCESS\nend\n"
    )
    made = make_loopback(settings={"JobSubmitPlugins": "lua", "KillWait": "7"}, files={"job_submit.lua": lua})
    assert "KillWait                = 7 sec" in made.command("scontrol", "show", "config").stdout
    assert "hello from lua" in made.command("sbatch", "-o/dev/null", "--wrap", "true").stderr


def test_accounting_records_the_gpus_of_a_job(
    make_loopback: MakeLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A starting MariaDB removes #sql files from its temporary folder: another server's, if that uses the same folder.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    others = tmp_path / "#sql-temptable-535d-1-3"
    others.touch()
    made = make_loopback("t4:1x4", accounting=True)
    assert others.exists()
    made.command("srun", "--gres=gpu:2", "true")
    listing = ("sacct", "-XnP", "-o", "AllocTRES,State")
    wait_for(lambda: "COMPLETED" in made.command(*listing).stdout, 120, "the job is in the accounts")
    assert "gres/gpu=2" in made.command(*listing).stdout
    made.down()
    assert made.processes() == set()


# Starts that cannot succeed


def test_a_daemon_that_dies_at_start_shows_its_log(tmp_path: Path) -> None:
    broken = LoopbackCluster(tmp_path, "t4:1x4", settings={"SelectType": "select/nonesuch"})
    with pytest.raises(LoopbackError, match=r"(?s)slurmctld died.*nonesuch"):
        broken.up()
    assert broken.processes() == set()


def test_a_node_that_never_comes_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = LoopbackCluster.start_slurmctld
    monkeypatch.setattr(LoopbackCluster, "start_slurmctld", lambda self, timeout_s: start(self))  # it may take longer
    broken = LoopbackCluster(tmp_path, "t4:1x4", settings={"SlurmdParameters": "shutdown_on_reboot"})
    with pytest.raises(LoopbackError, match=r"1 nodes are idle(?s:.*)logs are in"):
        broken.up(timeout_s=2)  # without config_overrides no machine here has 64 CPUs and 256 GB, so it is invalid
    assert broken.processes() == set()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(tmp_path: Path) -> None:
    first = machine.free_ports(3)
    with socket.create_server(("127.0.0.1", first + 2)):
        refused = LoopbackCluster(tmp_path, "t4:1x4", port=first)
        with pytest.raises(PortInUse, match=f"TCP port {first + 2} is in use"):
            refused.up()
    assert refused.processes() == set()


@pytest.mark.parametrize("lost", [0, 2], ids=["slurmctld", "slurmd"])
def test_a_port_lost_in_a_race_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    second = machine.free_ports(3)
    with socket.socket() as taken:
        first = wait_for(lambda: bound(taken, lost), 120, "a free port")
        places = iter([first, second])
        monkeypatch.setattr(machine, "free_ports", lambda count: next(places))
        with LoopbackCluster(tmp_path, "t4:1x4") as made:
            assert f"SlurmctldPort={second}\n" in made.slurm_conf.read_text()


def bound(taken: socket.socket, lost: int) -> int | None:
    """The first of three ports, one of which the socket has taken. None: another process was faster.

    The socket does not listen, or `scontrol ping` would wait for its answer.
    """
    first = machine.free_ports(3)
    try:
        taken.bind(("127.0.0.1", first + lost))
    except OSError:
        return None
    return first


def test_a_folder_holds_one_cluster(make_loopback: MakeLoopback) -> None:
    there = make_loopback()
    with pytest.raises(LoopbackError, match="already runs"):
        LoopbackCluster(there.folder, "t4:1x4").up()
    there.command("squeue")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "log" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(LoopbackError, match="holds other files"):
        LoopbackCluster(tmp_path, "t4:1x4").up()
    assert thesis.read_text() == "years of work"


def test_a_folder_that_slurm_conf_cannot_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopbackError, match=r"slurm\.conf cannot hold"):
        LoopbackCluster(tmp_path / "my cluster", "t4:1x4").up()


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.3])
def test_down_cleans_up_after_a_start_that_was_killed(tmp_path: Path, after_s: float) -> None:
    folder = tmp_path / "cluster"
    code = f"from penstock_loopback import LoopbackCluster\nprint(flush=True)\nLoopbackCluster({str(folder)!r}).up()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        time.sleep(after_s)
        starter.send_signal(signal.SIGKILL)
    try:
        left = LoopbackCluster.open(folder)
    except NotRunning:
        return  # killed before the first daemon
    left.down()
    assert left.processes() == set()


def test_down_ends_a_cluster_whose_folder_was_deleted(make_loopback: MakeLoopback) -> None:
    started = make_loopback()
    running(started, submit(started))
    shutil.rmtree(started.folder, ignore_errors=True)
    LoopbackCluster.open(started.folder).down()
    assert started.processes() == set()
    with pytest.raises(NotRunning):
        LoopbackCluster.open(started.folder)


def test_down_finds_daemons_that_were_never_recorded(make_loopback: MakeLoopback) -> None:
    started = make_loopback()
    state_file = started.folder / STATE_FILE
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"daemons": {}}))
    LoopbackCluster.open(started.folder).down()
    assert started.processes() == set()
