"""Changes to configuration files: made, shown, and undone, also after another edit of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock_scheduler.people.errors import PenstockError
from penstock_slurm.gateway import SlurmNode, SlurmPartition
from penstock_slurm.gateway.conf_edits import LineEdit, append_line, set_key, set_plugin, undo, with_plugin
from penstock_slurm.install import changes
from penstock_slurm.install.changes import Change
from penstock_slurm.install.sitefile import site_lua
from penstock_slurm.settings import SlurmSettings

CONF = "ClusterName=x\njobsubmitplugins = all_partitions # ours\n\nNodeName=a\n"


def test_a_key_is_set_in_its_own_line_or_at_the_end():
    text, edits = set_key(CONF, "JobSubmitPlugins", "all_partitions,lua")
    assert text == "ClusterName=x\nJobSubmitPlugins=all_partitions,lua # ours\n\nNodeName=a\n"
    assert edits == [LineEdit("jobsubmitplugins = all_partitions # ours", "JobSubmitPlugins=all_partitions,lua # ours")]
    text, edits = set_key("A=1", "JobRequeue", "1")
    assert (text, edits) == ("A=1\nJobRequeue=1\n", [LineEdit(None, "JobRequeue=1")])
    assert set_key("A=1\n", "A", "1") == ("A=1\n", [])


def test_a_commented_line_is_not_the_keys():
    assert set_key("#JobRequeue=0\n", "JobRequeue", "1")[0] == "#JobRequeue=0\nJobRequeue=1\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", "lua"), ("lua", "lua"), ("a, b", "a,b,lua"), ("all_partitions,lua", "all_partitions,lua")],
)
def test_a_list_gets_one_more(value, expected):
    assert with_plugin(value, "lua") == expected


@given(st.lists(st.sampled_from(["A=1", "B=2", "JobRequeue=0", "# x", ""])), st.booleans())
def test_undo_takes_back_what_was_done(lines, newline):
    before = "\n".join(lines) + ("\n" if newline and lines else "")
    text, edits = set_key(before, "JobRequeue", "1")
    text, more = append_line(text, "optional x.so")
    restored, lost = undo(text, edits + more)
    assert lost == []
    assert restored.splitlines() == before.splitlines()


def test_undo_keeps_what_others_added_and_tells_what_is_lost():
    text, edits = set_key("A=1\n", "B", "2")
    assert undo("A=3\nB=2\nC=4\n", edits) == ("A=3\nC=4\n", [])
    assert undo("A=3\nB=9\n", edits) == ("A=3\nB=9\n", edits)
    assert text == "A=1\nB=2\n"


def test_a_file_goes_back_byte_for_byte_and_its_mode_stays(tmp_path: Path):
    conf, new, record = tmp_path / "slurm.conf", tmp_path / "sub" / "new.lua", tmp_path / changes.RECORD
    conf.write_text("A=1")  # without a newline at its end
    conf.chmod(0o640)
    text, edits = set_key("A=1", "B", "2")
    wanted = [Change(new, b"ours"), Change(conf, text.encode(), tuple(edits))]
    assert "+B=2" in wanted[1].diff()
    changes.apply(wanted, record)
    assert (conf.read_text(), conf.stat().st_mode & 0o777) == ("A=1\nB=2\n", 0o640)
    assert conf.with_name("slurm.conf.before-penstock").read_text() == "A=1"
    changes.carry_out(changes.plan_undo(record), record)
    assert (conf.read_text(), conf.stat().st_mode & 0o777) == ("A=1", 0o640)
    assert [path.name for path in tmp_path.rglob("*")] == ["slurm.conf"], "the folder that was made goes, too"


def test_a_file_of_the_sites_that_has_the_name_of_ours_comes_back(tmp_path: Path):
    record, cron = tmp_path / changes.RECORD, tmp_path / "penstock"
    cron.write_text("# the site's own\n")
    for version in (b"1", b"2"):
        changes.apply([Change(cron, version)], record)
    changes.carry_out(changes.plan_undo(record), record)
    assert cron.read_text() == "# the site's own\n"
    assert [path.name for path in tmp_path.iterdir()] == ["penstock"]


def test_a_folder_that_others_use_now_stays(tmp_path: Path):
    record = tmp_path / changes.RECORD
    changes.apply(
        [Change(tmp_path / "lib" / "ours" / "a", b"1"), Change(tmp_path / "lib" / "ours" / "b", b"2")], record
    )
    (tmp_path / "lib" / "others").touch()
    changes.carry_out(changes.plan_undo(record), record)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["lib", "others"]


def test_the_plugins_line_says_where_the_agents_are_and_goes_back():
    line = "optional /lib/penstock.so checkpoint-every=30 # ours"
    assert set_plugin(line, "/lib/penstock.so", None) == (line, []), "without agents it is as the admin left it"
    assert set_plugin(line, "/lib/penstock.so", "") == (line, [])
    text, edits = set_plugin(line, "/lib/penstock.so", "/run/ours")
    assert text == "optional /lib/penstock.so checkpoint-every=30 run_dir=/run/ours\n"
    assert set_plugin(text, "/lib/penstock.so", "/run/ours") == (text, [])
    again, more = set_plugin(text, "/lib/penstock.so", "")
    assert again == "optional /lib/penstock.so checkpoint-every=30\n"
    assert undo(again, edits + more) == (line + "\n", [])
    assert set_plugin("", "/lib/penstock.so", "/run/ours")[0] == "optional /lib/penstock.so run_dir=/run/ours\n"


def test_an_upgrade_keeps_the_first_backup(tmp_path: Path):
    conf, record = tmp_path / "plugstack.conf", tmp_path / changes.RECORD
    conf.write_text("optional other.so\n")
    for version in ("1", "2"):
        text, edits = append_line(conf.read_text(), f"optional penstock{version}.so")
        changes.apply([Change(conf, text.encode(), tuple(edits))], record)
    changes.carry_out(changes.plan_undo(record), record)
    assert conf.read_text() == "optional other.so\n"


def test_what_an_admin_changed_since_is_kept(tmp_path: Path):
    conf, record = tmp_path / "slurm.conf", tmp_path / changes.RECORD
    conf.write_text("A=1\n")
    text, edits = set_key("A=1\n", "B", "2")
    changes.apply([Change(conf, text.encode(), tuple(edits))], record)
    conf.write_text("A=1\nB=2\nNodeName=new\n")
    (step,) = changes.plan_undo(record)
    assert (step.after, step.message) == (b"A=1\nNodeName=new\n", "")
    conf.write_text("A=1\nB=3\nNodeName=new\n")
    (step,) = changes.plan_undo(record)
    assert step.after == b"A=1\nB=3\nNodeName=new\n"
    assert "'B=2' is missing" in step.message


def test_no_installation_is_said_to_be_none(tmp_path: Path):
    with pytest.raises(PenstockError, match="records no installation"):
        changes.plan_undo(tmp_path / changes.RECORD)


def node(name: str, gpus: dict[str, int], *partitions: str, features: tuple[str, ...] = ()) -> SlurmNode:
    return SlurmNode(name, gpus, {}, frozenset({"IDLE"}), partitions, 8, 0, 100, 0, features=features)


PARTITIONS = [
    SlurmPartition("gpu", ("a", "b", "c"), True, True, None),
    SlurmPartition("cpu", ("c",), True, False, None),
]
NODES = [
    node("b", {"t4": 4}, "gpu", features=("ib", "nvme")),
    node("a", {"": 2}, "gpu", features=("ib",)),
    node("c", {}, "gpu", "cpu", features=("ib", "cpu")),
]


def test_the_sites_list():
    settings = SlurmSettings(partitions=("gpu",), plain_after_s=600)
    assert site_lua(settings, PARTITIONS, NODES, ["ncf", "my model"], {64030, 0}, cloud=False, memory=True) == (
        """-- Written by `penstock slurm sync`, which overwrites it.
return {
  admins = {[0] = true, [64030] = true},
  cloud = false,
  memory = true,
  spool = "/var/spool/penstock",
  plain_after_s = 600,
  families = {
    ["ncf"] = true,
  },
  features = {
    ["ib"] = {["a"] = true, ["b"] = true},
    ["nvme"] = {["b"] = true},
  },
  nodes = {
    ["a"] = {cpus = 8, memory_mb = 100, tmp_mb = 0},
    ["b"] = {cpus = 8, memory_mb = 100, tmp_mb = 0},
  },
  partitions = {
    {name = "gpu", types = {
      ["gpu"] = {["a"] = 2},
      ["t4"] = {["b"] = 4},
    }},
  },
}
"""
    )


def test_the_sites_list_says_whose_jobs_are_adopted():
    settings = SlurmSettings(partitions=("gpu",), adopt=("user:ada", "account:ml"))
    text = site_lua(settings, PARTITIONS, NODES, [], {0}, cloud=False, memory=True)
    assert '  adopt = {\n    ["account:ml"] = true,\n    ["user:ada"] = true,\n  },\n' in text


@pytest.mark.parametrize("adopt", ["ada", "group:ml", "user:", "partition:cpu", "user:a b"])
def test_what_cannot_be_adopted_is_refused(adopt: str):
    with pytest.raises(ValidationError, match="adopt"):
        SlurmSettings(partitions=("gpu",), adopt=(adopt,))


@pytest.mark.parametrize(
    ("partitions", "nodes", "words"),
    [
        (("gpus",), NODES, "Slurm has no partition gpus; the partitions are cpu, gpu"),
        (("cpu",), NODES, "no node of the partitions cpu has GPUs"),
        (("gpu",), [node('a"] = 1}, os.exit() --', {"t4": 1}, "gpu")], "a name in Slurm should not have"),
    ],
)
def test_a_list_that_cannot_be_is_not_written(partitions, nodes, words):
    with pytest.raises(PenstockError, match=words.replace("(", r"\(")):
        site_lua(SlurmSettings(partitions=partitions), PARTITIONS, nodes, [], {0}, cloud=True, memory=True)
