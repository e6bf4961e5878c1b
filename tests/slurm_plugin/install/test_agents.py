"""Units with a site's paths, and findings about the nodes' agents."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_scheduler import __version__
from penstock_scheduler.api.agent_messages import Lack, NodeStatus, XidSeen, agent_folder, status_file
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.settings import load_settings
from penstock_slurm.gateway import SlurmNode
from penstock_slurm.gateway.abilities import release
from penstock_slurm.install.agents import check_cgroups, check_processes, judge
from penstock_slurm.install.cli import app
from penstock_slurm.install.units import AGENT, MOUNT, agent_units, api_units, daemon_unit

NOW_S = 1e9


def node(name: str, gpus: int = 4, state: str = "IDLE") -> SlurmNode:
    return SlurmNode(name, {"t4": gpus} if gpus else {}, {}, frozenset({state}), ("gpu",), 8, 0, 100, 0)


def tells(
    spool: Path,
    name: str,
    age_s: float = 1.0,
    release: str = __version__,
    xids: tuple[XidSeen, ...] = (),
    lacks: tuple[Lack, ...] = (),
) -> None:
    agent_folder(spool, name).mkdir(parents=True)
    status = NodeStatus(node=name, order=0, time_s=NOW_S - age_s, history="h", release=release, xids=xids, lacks=lacks)
    status_file(spool, name).write_text(status.model_dump_json())


def test_agents_that_report_are_counted_and_nodes_without_gpus_or_power_are_not_missed(tmp_path: Path):
    tells(tmp_path, "a")
    tells(tmp_path, "b", age_s=14)
    nodes = [
        node("a"),
        node("b", state="DRAIN"),
        node("c", 0),
        node("d", state="DOWN"),
        node("e", state="POWERED_DOWN"),
    ]
    (finding,) = judge(nodes, tmp_path, NOW_S)
    assert (finding.what, finding.remedy) == (
        "the agents of 2 of 2 nodes with GPUs report; 2 more are down or powered down",
        "",
    )


def test_each_thing_that_is_wrong_has_its_nodes_and_its_remedy(tmp_path: Path):
    tells(tmp_path, "fine")
    tells(tmp_path, "late", age_s=40)
    tells(tmp_path, "later", age_s=400)
    tells(tmp_path, "ahead", age_s=-60)
    tells(tmp_path, "old", release="")
    tells(tmp_path, "newer")
    status_file(tmp_path, "newer").write_text('{"version": 2}')
    nodes = [node(name) for name in ("fine", "late", "later", "ahead", "old", "newer", "none")]
    well, *wrong = judge(nodes, tmp_path, NOW_S)
    assert well.what == "the agents of 1 of 7 nodes with GPUs report"
    found = {finding.what: finding.remedy for finding in wrong}
    for words, remedy in {
        "the agent of late, later has not reported for 15 s or more (the longest: 400 s)": "systemctl status penstock-agent",
        "the agent of ahead has a clock ahead of this host's": "NTP",
        f"the agent of old is not version {__version__}": "systemctl restart penstock-agent",
        "the agent of newer writes reports that this version cannot read": f"install Penstock {__version__} there",
        "the agent of none has never reported": str(tmp_path),
    }.items():
        assert remedy in found.pop(words)
    assert not found


def test_gpus_that_fail_are_named(tmp_path: Path):
    """Neither old errors nor XID 31, which a program causes."""
    ages_s = ((79, 3, 60.0), (79, 3, 50.0), (31, 0, 60.0), (48, 1, 90_000.0))
    xids = tuple(
        XidSeen(number=number, time_s=NOW_S - age_s, device=gpu, xid=xid)
        for number, (xid, gpu, age_s) in enumerate(ages_s)
    )
    tells(tmp_path, "a", xids=xids)
    well, wrong = judge([node("a")], tmp_path, NOW_S)
    assert (well.remedy, wrong.what) == ("", "NVIDIA's driver reported errors within a day: XID 79 of GPU 3 of a")
    assert "journalctl -k" in wrong.remedy


def test_what_agents_find_wrong_with_their_nodes_is_told_with_the_remedy(tmp_path: Path):
    tells(tmp_path, "a", lacks=("no-mps", "no-plugin"))
    tells(tmp_path, "b", lacks=("no-plugin",))
    tells(tmp_path, "c", lacks=("no-devices", "old-plugin", "strangers"))
    tells(tmp_path, "d", lacks=("no-freezer", "no-limiter", "no-nvml"))
    well, *wrong = judge([node(name) for name in "abcd"], tmp_path, NOW_S)
    assert (well.what, well.remedy) == ("the agents of 4 of 4 nodes with GPUs report", "")
    found = {finding.what: finding.remedy for finding in wrong}
    for words, remedy in {
        "the agent of a, b finds no penstock.so that Slurm loads": "its line of plugstack.conf",
        f"the agent of c finds a penstock.so that is not version {__version__}": "copy this host's",
        "the agent of c cannot give GPUs to jobs that share": "unit penstock-agent.service --constrain-devices",
        "the agent of c sees processes that belong to no job use GPUs": "`journalctl -u penstock-agent` names them",
        "the agent of d may not freeze jobs": "has CAP_KILL and ProtectControlGroups=no",
        "the agent of d cannot ask NVIDIA's driver": "run nvidia-smi",
        "the agent of d finds no HAMi-core in [agent] limiter": "libvgpu.so there on each node",
        "the agent of a finds no nvidia-cuda-mps-control in [agent] mps_dir": "DIR nvidia-cuda-mps-control -d",
    }.items():
        (what,) = [what for what in found if what.startswith(words)]
        assert remedy in found.pop(what)
    assert not found


def test_what_a_newer_agent_lacks_leaves_its_status_readable(tmp_path: Path):
    """This release has no word for some of it."""
    tells(tmp_path, "a", release="99", lacks=("no-mps",))
    path = status_file(tmp_path, "a")
    path.write_text(path.read_text().replace('["no-mps"]', '["no-mps","no-luck","no-time"]'))
    wrong = judge([node("a")], tmp_path, NOW_S)
    assert [finding.what.partition(" a ")[2].partition(" in ")[0] for finding in wrong] == [
        f"is not version {__version__}",
        "finds no nvidia-cuda-mps-control",
        "cannot find out whether its node lacks anything that sharing needs",
    ]


def test_nodes_of_mig_devices_need_no_agent(tmp_path: Path):
    """Slurm binds each job to its own device. A node that has whole GPUs, too, needs one, which says that it cannot run there."""
    kinds = {"a": {"1g.5gb": 7}, "b": {"a100_3g.20gb": 2, "a100_1g.5gb": 1}, "c": {"a100": 4, "a100_1g.5gb": 7}}
    nodes = [dataclasses.replace(node(name), gpus=gpus) for name, gpus in kinds.items()]
    (finding,) = judge(nodes, tmp_path, NOW_S)
    assert finding.what.startswith("the agent of c has never reported")


def test_many_nodes_are_not_all_named(tmp_path: Path):
    (finding,) = judge([node(f"n{number:02d}") for number in range(20)], tmp_path, NOW_S)
    assert finding.what == "the agent of n00, n01, n02, n03, n04, n05, n06, n07, 12 more has never reported"


def units(folder: Path, *lines: str, constrained: bool = False) -> dict[str, str]:
    config = folder / "penstock.toml"
    config.write_text("\n".join(["[slurm]", "partitions = ['gpu']", *lines]) + "\n")
    return agent_units(load_settings(config), config, constrained=constrained) | {
        "penstockd.service": daemon_unit(config)
    }


def test_the_apis_units_have_the_sites_user_and_socket(tmp_path: Path):
    config = tmp_path / "penstock.toml"
    config.write_text("[slurm]\npartitions = ['gpu']\n[api]\nuser = 'reader'\n")
    assert api_units(load_settings(config), config) == {}, "penstockd serves the API itself"
    config.write_text(
        "[slurm]\npartitions = ['gpu']\n[api]\nembedded = false\nuser = 'reader'\nsocket = '/fast/api.sock'\n"
    )
    found = api_units(load_settings(config), config)
    assert set(found) == {"penstock-api.service", "penstock-api.socket"}
    assert f"penstock-api --config {tmp_path}/penstock.toml\n" in found["penstock-api.service"]
    assert "\nUser=reader\n" in found["penstock-api.service"]
    assert "\nListenStream=/fast/api.sock\n" in found["penstock-api.socket"]
    told = CliRunner().invoke(app, ["unit", "penstock-api.socket", "--config", str(config)])
    assert told.output == found["penstock-api.socket"]
    config.write_text("[slurm]\npartitions = ['gpu']\n")
    refused = CliRunner().invoke(app, ["unit", "penstock-api.service", "--config", str(config)])
    assert isinstance(refused.exception, PenstockError)
    assert "embedded = false" in str(refused.exception)


def test_the_units_have_the_sites_paths(tmp_path: Path):
    found = units(tmp_path, "spool_dir = '/shared/spool'")
    assert set(found) == {AGENT, MOUNT, "penstockd.service"}
    assert f"penstock-agent --config {tmp_path}/penstock.toml\n" in found[AGENT]
    assert f"penstockd --config {tmp_path}/penstock.toml\n" in found["penstockd.service"]
    assert "\nReadWritePaths=-/shared/spool\n" in found[AGENT]
    assert "\nRuntimeDirectory=penstock\n" in found[AGENT]
    own = units(tmp_path, "[agent]", "run_dir = '/fast/%n/run'", "state_dir = '/state/agent'")
    assert MOUNT not in own
    assert "ExecStartPre" not in found[AGENT]
    assert "\nReadWritePaths=-/var/spool/penstock -/fast -/state/agent\n" in own[AGENT]
    assert "\nExecStartPre=+/bin/mkdir -p /fast /state/agent\nExecStart=/" in own[AGENT]
    assert "RuntimeDirectory" not in own[AGENT]
    assert "StateDirectory" not in own[AGENT]


def test_where_devices_are_constrained_the_agent_may_open_them(tmp_path: Path):
    usual, opens = (units(tmp_path, constrained=each)[AGENT].splitlines() for each in (False, True))
    left, came = ([line for line in one if line not in other] for one, other in ((usual, opens), (opens, usual)))
    (before,) = (line for line in left if line.startswith("CapabilityBoundingSet="))
    assert left == [before, "SystemCallFilter=@system-service"]
    assert came == [
        f"CapabilityBoundingSet=CAP_SYS_ADMIN CAP_NET_ADMIN {before.partition('=')[2]}",
        "SystemCallFilter=@system-service bpf",
        "LimitMEMLOCK=infinity",
    ]


def test_the_agent_may_freeze_jobs_by_their_cgroups(tmp_path: Path):
    for constrained in (False, True):
        assert "ProtectControlGroups=no" in units(tmp_path, constrained=constrained)[AGENT].splitlines()


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    own = units(tmp_path, "[agent]", "run_dir = '/fast'")[AGENT]
    opens = units(tmp_path, constrained=True)[AGENT]
    for name, text in (units(tmp_path) | {"own.service": own, "opens.service": opens}).items():
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), name


def test_slurm_has_to_suspend_all_processes_of_a_job():
    assert check_processes({"ProctrackType": "proctrack/cgroup"}).remedy == ""
    remedy = check_processes({"ProctrackType": "proctrack/linuxproc"}).remedy
    assert "it is proctrack/linuxproc: a process that leaves its job's process tree" in remedy
    assert "Set ProctrackType=proctrack/cgroup in slurm.conf" in remedy


@pytest.mark.parametrize(
    ("version", "config", "findings"),
    [
        ((24, 11), {"ConstrainDevices": "yes"}, [True]),
        ((26, 5), {"ConstrainDevices": "yes"}, [False]),
        ((26, 5), {"ConstrainDevices": "yes", "CgroupJobIdPaths": "yes"}, [True]),
        ((26, 5), {"ConstrainDevices": "no"}, []),
    ],
)
def test_agents_have_to_find_the_cgroups_of_jobs(
    version: tuple[int, int], config: dict[str, str], findings: list[bool]
):
    """From 26.05 on, Slurm names them by another id of the job unless it is told not to."""
    config["TaskPlugin"] = "task/cgroup"
    found = list(check_cgroups(config, release(version)))
    assert [not finding.remedy for finding in found] == findings
    assert all("CgroupJobIdPaths=yes" in finding.remedy for finding in found if finding.remedy)
