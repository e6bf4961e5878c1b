"""What a review of the reading of headers has found: each test is an attack that once worked."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_scheduler.model import Placement, Progress, Share, Start, parse_spec
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway.parse import parse_partitions
from penstock_slurm.install.units import source
from penstock_slurm.jobs.notes import plain_shape
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending

ODD_NOTES: list[object] = [
    "x",
    [],
    None,
    {"tasks": "a"},
    {"other": 1},
    {"gpus": 0},
    {"tasks": 1e308},
    {"tasks": float("nan")},
    {"gpus": 1.5, "tasks": 3},
    {"cpus": 1e308},
    {"memory_mb": float("inf")},
    {"memory_mb": 10**4200, "node_gpus": 1},
    {"tasks": True},
    {"whole_nodes": [1]},
]


@pytest.mark.parametrize("note", ODD_NOTES, ids=lambda note: json.dumps(note)[:30])
def test_a_bad_note_about_the_request_concerns_its_job_alone(tmp_path: Path, note: object) -> None:
    """An operator or a script of the site writes AdminComment. A bad note ended every tick, for the jobs of all users."""
    told = Told()
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
    cluster = SlurmCluster(told, told, Spool(tmp_path / "spool"), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]
    odd = json.dumps({"penstock": {"max_gpus": 1}, "penstock_request": note})
    told.listed = [pending("gpu", admin_comment=odd), dataclasses.replace(pending("debug"), id="8", number=8)]
    state = cluster.observe()
    assert [job.id for job in state.jobs] == ["8"]
    assert [refusal.job for refusal in state.refused] == ["7"]
    assert "penstock_request" in state.refused[0].text
    (outcome,) = cluster.apply([Start("8", 1, Placement("gpu", "debug", (Share("n1", 1),)))])
    assert outcome.progress is Progress.UNDER_WAY


@pytest.mark.parametrize("number", [float("inf"), float("nan"), "9" * 5000])
@pytest.mark.parametrize("field", ["nodes", "gpus_per_node"])
def test_an_odd_note_about_the_plain_job_is_no_shape(field: str, number: object) -> None:
    """An infinite number ended every observation."""
    shape = {"partition": "gpu", "nodes": 1, "gpus_per_node": 1, field: number}
    odd = json.dumps({"penstock": {"max_gpus": 1}, "penstock_plain": shape})
    assert plain_shape(pending("gpu", admin_comment=odd)) is None


# What slurmctld's Lua gets is what a client sends, which need not be sbatch. A job table, and what the user is told.
HARNESS = """
slurm = {NO_VAL = 4294967294, NO_VAL16 = 65534, NO_VAL8 = 254, NO_VAL64 = 2 ^ 64 - 2, SUCCESS = 0, ERROR = -1}
function slurm.log_user(form, ...) print("told " .. string.format(form, ...)) end
function slurm.log_error(form, ...) print("broken " .. string.format(form, ...)) end
local job = {
  begin_time = 0, script = "#!/bin/sh", environment = {}, spank_job_env = {"PENSTOCK_ADAPTIVE=adaptive"}, shared = 65534,
  requeue = 65534, ntasks_per_node = 65534, ntasks_per_tres = 65534, cpus_per_task = 65534,
}
for _, field in ipairs({"num_tasks", "min_nodes", "max_nodes", "time_limit", "priority"}) do job[field] = slurm.NO_VAL end
job.min_mem_per_node = slurm.NO_VAL64
for field, value in pairs(load_job()) do job[field] = value end
local began = os.clock()
local code = dofile(arg[1] .. "/penstock.lua").job_submit(job, {all = {max_share = 1, max_time = slurm.NO_VAL}}, 1000)
print("code " .. code, "took " .. os.clock() - began)
if code == 0 then print("note " .. job.admin_comment) end
"""
SITE = 'return {families = {}, features = {}, partitions = {{name = "all", types = {t4 = {a = 8, b = 8}}}}}'
LUAS = [found for name in ("lua5.1", "lua5.4") if (found := shutil.which(name))]


def submitted(lua: str, folder: Path, fields: str) -> dict[str, str]:
    """What penstock.lua makes of a job with these fields: the first line of each kind."""
    shutil.copy(source("lua") / "penstock.lua", folder)
    (folder / "penstock_site.lua").write_text(SITE)
    (folder / "penstock_starts.lua").write_text("return {}")
    (folder / "try.lua").write_text(f"local function load_job() return {{{fields}}} end\n{HARNESS}")
    done = subprocess.run(
        [lua, str(folder / "try.lua"), str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        kind, _, text = line.partition(" ")
        found.setdefault(kind, text)
    return found


@pytest.mark.parametrize("lua", LUAS)
@pytest.mark.parametrize(
    "fields",
    [
        'tres_per_task = ("cpu:1,"):rep(500000) .. "gres/gpu:1", num_tasks = 4',
        'tres_per_node = ("cpu:1,"):rep(500000) .. "gres:gpu:1"',
        'tres_per_node = "gres:gpu:1", tres_per_task = ("cpu:1,"):rep(500000)',
    ],
    ids=["of a task", "of a node", "beside that of a node"],
)
def test_a_long_request_does_not_keep_slurmctld_waiting(tmp_path: Path, lua: str, fields: str) -> None:
    """Each megabyte cost a seventh of a second, in which slurmctld did nothing else; a client may send a hundred."""
    found = submitted(lua, tmp_path, fields)
    assert "too long" in found["told"]
    assert found["code"].startswith("-1")
    assert "broken" not in found


@pytest.mark.parametrize("lua", LUAS)
@pytest.mark.parametrize(
    "fields",
    [
        'tres_per_job = "gres:gpu:4", max_nodes = 0, num_tasks = 3',
        'tres_per_node = "gres:gpu:1", min_nodes = 0',
        'tres_per_node = "gres:gpu:1", ntasks_per_node = 0, num_tasks = 5',
        "ntasks_per_tres = 0, num_tasks = 4",
        'tres_per_node = "gres:gpu:2", min_nodes = 1, max_nodes = 1, num_tasks = 4294967293',
    ],
)
def test_numbers_that_no_header_has_are_refused_and_are_no_fault_of_the_site(
    tmp_path: Path, lua: str, fields: str
) -> None:
    """A 0 was an error of the script, which told the user, and slurmctld's log, that the admin had to fix the site."""
    found = submitted(lua, tmp_path, fields)
    assert "broken" not in found
    assert found["code"].startswith("-1")
    assert re.search("out of bounds|Slurm takes at most 65533 on a node", found["told"])


@pytest.mark.parametrize("lua", LUAS)
def test_slurm_accepts_no_job_whose_spec_penstockd_refuses(tmp_path: Path, lua: str) -> None:
    """More nodes than a job spec may name: Slurm took the job, and penstockd refused it."""
    flags = 'spank_job_env = {"PENSTOCK_ADAPTIVE=adaptive", "PENSTOCK_MAX_GPUS=8"}, tres_per_node = "gres:gpu:1"'
    found = submitted(lua, tmp_path, f"{flags}, min_nodes = 1, max_nodes = 2000000000")
    assert found["code"].startswith("-1")
    found = submitted(lua, tmp_path, f"{flags}, min_nodes = 1, max_nodes = 1000000000")
    spec = parse_spec(found["note"])
    assert spec is not None
    assert spec.max_nodes == 10**9


@pytest.mark.parametrize("lua", LUAS)
@pytest.mark.parametrize("shared", [2, 3, 4], ids=["user", "mcs", "topo"])
def test_no_adaptive_job_keeps_other_users_off_its_nodes(tmp_path: Path, lua: str, shared: int) -> None:
    """With --exclusive=user, a job of one GPU had its node for itself and counted as one GPU."""
    found = submitted(lua, tmp_path, f'tres_per_node = "gres:gpu:1", shared = {shared}')
    assert found["code"].startswith("-1")
    assert "--exclusive=user" in found["told"]


@pytest.mark.parametrize("word", ["apart", "exclusive"])
@pytest.mark.parametrize("comment", ["", '{"penstock": {"max_gpus": 1}}'], ids=["plain", "managed"])
def test_nobody_is_sent_to_a_node_beside_a_job_that_slurm_keeps_apart(tmp_path: Path, word: str, comment: str) -> None:
    """Slurm starts no job of another user there. Honest jobs were stopped elsewhere, and sent there in vain."""
    told = Told()
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
    cluster = SlurmCluster(told, told, Spool(tmp_path / "spool"), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]
    runs = {"state": "RUNNING", "nodes": ("n0",), "priority": 9, "start_s": 10.0}
    told.listed = [pending("gpu", comment=comment, **runs, **{word: True})]
    state = cluster.observe()
    taken = {name: sum(job.allocation.gpus for job in state.jobs if job.allocation) for name in ("n0",)}["n0"]
    assert {node.name: node.gpus_for_us - (taken if node.name == "n0" else 0) for node in state.nodes} == {
        "n0": 0,
        "n1": 4,
    }


def test_a_job_of_some_gpus_is_not_moved_into_a_partition_that_gives_whole_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it would keep a node's other GPUs idle. Slurm then shows it as one with --exclusive, which was refused."""
    told = Told()
    before = told.partitions()
    whole = tuple(dataclasses.replace(each, whole_nodes=each.name == "debug") for each in before)
    monkeypatch.setattr(told, "partitions", lambda: whole)
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
    cluster = SlurmCluster(told, told, Spool(tmp_path / "spool"), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]
    note = json.dumps({"penstock": {"max_gpus": 1}, "penstock_request": {"whole_nodes": True}})
    told.listed = [
        pending("gpu"),
        dataclasses.replace(pending("gpu", admin_comment=note), id="8", number=8),
        dataclasses.replace(pending("debug"), id="9", number=9),
    ]
    found = {job.id: job.partitions for job in cluster.observe().jobs}
    assert found == {"7": ("gpu",), "8": ("gpu", "debug"), "9": ("debug", "gpu")}


def test_whether_a_partition_gives_whole_nodes_is_read() -> None:
    line = "PartitionName=a Default=NO MaxTime=UNLIMITED Nodes=n[0-1] OverSubscribe=EXCLUSIVE State=UP"
    lines = (line, line.replace("=a ", "=b ").replace("EXCLUSIVE", "NO"))
    assert [each.whole_nodes for each in parse_partitions("\n".join(lines))] == [True, False]
