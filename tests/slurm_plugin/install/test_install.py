"""`penstock slurm install`, `check`, `sync` and `uninstall` on a real Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock_loopback.fixtures import MakeLoopback
from penstock_loopback.processes import wait_for
from penstock_scheduler.api.agent_messages import status_file
from penstock_slurm.gateway import abilities
from penstock_slurm.gateway.abilities import RELEASES, Release
from penstock_slurm.install import answers
from penstock_slurm.install.units import build_plugin
from tests.slurm_plugin.flags.site import FlagSite

pytestmark = pytest.mark.slurm


@pytest.fixture
def bare(tmp_path: Path, make_loopback: MakeLoopback) -> FlagSite:
    """A Slurm with a plugstack.conf of its own and nothing of ours."""
    if not Path("/usr/include/slurm/spank.h").exists() or shutil.which("make") is None:
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    cluster = make_loopback("t4:1x4", settings={"JobFileAppend": "0"}, files={"plugstack.conf": "# the site's own\n"})
    site = FlagSite(tmp_path, cluster)
    site.settings()
    site.config.write_text(site.config.read_text().replace("'all', ", ""))
    return site


def contents(site: FlagSite) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(site.etc.iterdir())}


def options(site: FlagSite, *more: str) -> tuple[str, ...]:
    return ("--prefix", str(site.folder / "lib"), "--schedule-dir", str(site.folder / "timer"), *more)


def test_install_shows_applies_verifies_and_uninstall_restores(bare: FlagSite) -> None:
    before = contents(bare)
    shown = bare.penstock("install", *options(bare, "--schedule", "systemd"))
    assert shown.exit_code == 0, shown.output
    for words in (
        f"new file: {bare.folder}/lib/penstock.so",
        "+JobSubmitPlugins=lua",
        "-JobFileAppend=0\n+JobFileAppend=1",
        f"+optional {bare.folder}/lib/penstock.so",
        "+OnUnitActiveSec=5min",
        f"slurm sync --quiet --config {bare.config}",
        "nothing was changed",
    ):
        assert words in shown.output
    assert contents(bare) == before

    wrong = bare.penstock("check")
    assert wrong.exit_code == 1
    assert "FAILED  slurmctld uses job_submit.lua" in wrong.output
    assert "run `penstock slurm install --apply`" in wrong.output

    made = bare.penstock("install", *options(bare, "--schedule", "systemd", "--apply"))
    assert made.exit_code == 0, made.output
    assert re.search(r"^ok      a job with flags \(\d+\) gets its job spec$", made.output, re.M), made.output
    assert bare.run("squeue", "-h").stdout == "", "the test jobs are cancelled"
    assert "FAILED" not in made.output
    assert (bare.folder / "timer" / "penstock-sync.timer").exists()
    assert "nothing to change" in bare.penstock("install", *options(bare, "--schedule", "systemd")).output

    waiting = bare.submit("--adaptive", "--max-gpus=2")
    dry = bare.penstock("uninstall")
    assert "before the files go: systemctl disable --now penstock-sync.timer" in dry.output
    assert "nothing was changed" in dry.output
    assert f"would wait forever: {waiting.id}" in dry.output
    assert "-JobSubmitPlugins=lua" in dry.output
    assert "have shared GPUs" not in dry.output
    bare.run("scontrol", "update", f"JobId={waiting.id}", "TresPerNode=")
    assert f"ask Slurm for none: {waiting.id}\n" in bare.penstock("uninstall").output
    gone = bare.penstock("uninstall", "--apply")
    assert gone.exit_code == 0, gone.output
    assert contents(bare) == before
    assert not (bare.folder / "timer").exists()
    assert not (bare.folder / "lib").exists()
    assert "unrecognized option" in bare.sbatch("--adaptive").stderr
    assert bare.sbatch("--hold").returncode == 0
    assert bare.penstock("uninstall").exit_code == 1  # nothing is installed any more


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda each: {"whole_nodes": {}}, "FAILED  a held job without --exclusive"),
        (
            lambda each: {"whole_nodes": {word: not whole for word, whole in each.whole_nodes.items()}},
            "FAILED  a held job with --exclusive",
        ),
        (lambda each: {"whole_nodes_field": "Contiguous"}, "says Contiguous=0"),
        (lambda each: {"job_states": each.job_states - {"PENDING"}}, "unknown: State=PENDING of jobs 1"),
        (lambda each: {"node_states": each.node_states - {"IDLE"}}, "unknown: State=IDLE of nodes t4-00"),
    ],
    ids=["words", "meaning", "field", "job state", "node state"],
)
def test_check_names_the_field_that_this_slurm_writes_otherwise(
    bare: FlagSite, monkeypatch: pytest.MonkeyPatch, broken: Callable[[Release], dict[str, object]], words: str
) -> None:
    """The table is right for the Slurm here, and then broken in one place."""
    bare.run("sbatch", "--hold", "--wrap=true")
    right = bare.penstock("check").output
    assert "among the tested versions: 22.05, 24.11, 26.05" in right
    assert "ok      the commands have slurmctld's version" in right
    assert "ok      slurmctld's clock agrees with this host's" in right
    assert "ok      all that Slurm says of its 1 jobs is known" in right
    assert len(re.findall(r"^ok      a held job with(?:out)? --exclusive \(\d+\) is read as one$", right, re.M)) == 2
    rows = [dataclasses.replace(each, **broken(each)) for each in RELEASES]
    monkeypatch.setattr(abilities, "RELEASES", tuple(rows))
    wrong = bare.penstock("check")
    assert wrong.exit_code == 1
    assert words in wrong.output
    assert "use a version of Penstock that knows this Slurm" in wrong.output


@pytest.mark.parametrize(("off_s", "words"), [(600.0, "behind this host's"), (-600.0, "ahead of this host's")])
def test_check_finds_that_the_clocks_differ(
    bare: FlagSite, monkeypatch: pytest.MonkeyPatch, off_s: float, words: str
) -> None:
    monkeypatch.setattr(answers, "time", SimpleNamespace(time=lambda: time.time() + off_s))
    checked = bare.penstock("check")
    assert checked.exit_code == 1
    assert "FAILED  slurmctld's clock agrees with this host's" in checked.output
    found = re.search(rf"it is (\d+) s {words}; synchronise both, for example with chrony", checked.output)
    assert found is not None, checked.output
    assert abs(int(found[1]) - 600) <= 10, "a second on an idle machine"


def test_agents_get_their_units_and_are_checked(tmp_path: Path, make_loopback: MakeLoopback) -> None:
    """The agents of a loopback cluster run already. `install` adds units, and `check` finds a killed agent."""
    if not Path("/usr/include/slurm/spank.h").exists() or shutil.which("make") is None:
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    cluster = make_loopback("t4:2x2", agents=True, files={"plugstack.conf": "# the site's own\n"})
    for name in ("job_submit.lua", "penstock.lua", "penstock_site.lua"):
        (cluster.slurm_conf.parent / name).unlink()  # a loopback cluster with agents has the flags already
    site = FlagSite(tmp_path, cluster)
    run_dir = cluster.environment()["PENSTOCK_RUN_DIR"]
    site.settings("agents = true", f"spool_dir = '{cluster.spool}'", "[agent]", f"run_dir = '{run_dir}'")
    before = contents(site)
    library = f"{cluster.slurm_conf.parent}/penstock.so"
    made = site.penstock("install", *options(site, "--schedule", "none", "--plugin", library, "--apply"))
    for words in (
        f"+optional {site.folder}/lib/penstock.so run_dir={run_dir}",
        f"+ReadWritePaths=-{cluster.spool} -{cluster.folder}/run",
        f"with the files of this host ({site.folder}/lib has the units):",
        "cp penstock-agent.service /etc/systemd/system/",
        "ok      plugstack.conf names the agents' folder",
    ):
        assert words in made.output
    assert made.exit_code == 0, "the nodes come after this host"
    assert "nodes with GPUs report" not in made.output
    well = "ok      the agents of 2 of 2 nodes with GPUs report"
    wait_for(lambda: well in site.penstock("check", "--no-jobs").output, 120, "both agents report", poll_s=1)
    lacks = "FAILED  the agent of t4-00, t4-01 finds"

    def found(words: str) -> None:
        wait_for(lambda: words in site.penstock("check", "--no-jobs").output, 120, words, poll_s=1)

    plugin, text = site.folder / "lib" / "penstock.so", (site.etc / "plugstack.conf").read_text()
    for path, wrong_text, words in (
        (
            plugin,
            plugin.read_bytes().replace(b"of Penstock", b"of Pennstok"),
            f"{lacks} a penstock.so that is not",
        ),
        (site.etc / "plugstack.conf", text.replace(run_dir, "/elsewhere").encode(), f"{lacks} no penstock.so"),
    ):
        right = path.read_bytes()
        path.write_bytes(wrong_text)
        for node in ("t4-00", "t4-01"):  # they check every 15 s, and when they begin
            cluster.kill_agent(node)
            cluster.start_agent(node)
        found(words)
        path.write_bytes(right)
    wait_for(lambda: lacks not in site.penstock("check", "--no-jobs").output, 120, "the agents to find it", poll_s=1)
    cluster.kill_agent("t4-01")
    status_file(cluster.spool, "t4-01").unlink()
    wrong = site.penstock("check", "--no-jobs")
    assert wrong.exit_code == 1
    assert "FAILED  Slurm suspends all processes of a job (ProctrackType=proctrack/cgroup)" in wrong.output
    assert "FAILED  the agent of t4-01 has never reported\n        on each node: systemctl enable --now" in wrong.output
    gone = site.penstock("uninstall", "--apply")
    assert "on each node with an agent: systemctl disable --now penstock-agent.service" in gone.output
    assert contents(site) == before
    assert not (site.folder / "lib").exists()


def test_a_file_that_was_edited_since_loses_our_lines_alone(bare: FlagSite) -> None:
    assert bare.penstock("install", *options(bare, "--schedule", "none", "--apply")).exit_code == 0
    with bare.slurm.slurm_conf.open("a") as conf:
        conf.write("# a later line of the admin's\n")
    assert bare.penstock("uninstall", "--apply").exit_code == 0
    text = bare.slurm.slurm_conf.read_text()
    assert "JobSubmitPlugins" not in text
    assert "JobFileAppend=0" in text
    assert "# a later line of the admin's" in text


def test_a_site_with_its_own_lua_calls_ours(bare: FlagSite) -> None:
    own = bare.etc / "job_submit.lua"
    own.write_text(
        "function slurm_job_submit(job, partitions, uid)\n"
        "  if job.account == 'closed' then slurm.log_user('account closed') return slurm.ERROR end\n"
        "  return slurm.SUCCESS\nend\n"
        "function slurm_job_modify() return slurm.SUCCESS end\nreturn slurm.SUCCESS\n"
    )
    made = bare.penstock("install", *options(bare, "--schedule", "none", "--apply"))
    assert made.exit_code == 1
    assert "FAILED  job_submit.lua calls penstock.lua" in made.output
    steps = made.output[made.output.index("left to do by hand:") :]
    assert f"- add to the site's own {own}:" in steps
    top, submit, modify = (line.split(" --")[0].strip() for line in steps.splitlines()[2:5])
    for each in ("start penstockd", "copy ", "mount /var/spool/penstock", "check --submit --user NAME"):
        assert each in steps
    assert "penstock-sync.timer" not in steps, "there is none"

    text = own.read_text().replace("  return slurm.SUCCESS\nend", f"  {submit}\nend")
    own.write_text(
        f"{top}\n"
        + text.replace(
            "slurm_job_modify() return slurm.SUCCESS", f"slurm_job_modify(job, record, partitions, uid) {modify}"
        )
    )
    later = own.stat().st_mtime + 2
    os.utime(own, (later, later))  # Slurm compares whole seconds
    assert bare.penstock("check").exit_code == 0
    assert "account closed" in bare.refusal("--account=closed", "--adaptive", "--max-gpus=2")
    assert bare.submit("--adaptive", "--max-gpus=2").admin_comment
    assert "add to the site's own" not in bare.penstock("install", *options(bare, "--schedule", "none")).output

    refused = bare.penstock("uninstall", "--apply")
    assert refused.exit_code == 1
    assert "remove those lines first" in str(refused.exception)
    own.write_text(
        own.read_text()
        .replace(submit, "return slurm.SUCCESS")
        .replace(modify, "return slurm.SUCCESS")
        .split("\n", 1)[1]
    )
    assert bare.penstock("uninstall", "--apply").exit_code == 0
    assert own.exists()


def test_sync_follows_the_cluster(bare: FlagSite) -> None:
    assert bare.penstock("install", *options(bare, "--schedule", "none", "--apply")).exit_code == 0
    assert "is up to date" in bare.penstock("sync").output
    assert bare.penstock("sync", "--quiet").output == ""
    assert "no GPUs of type h100" in bare.refusal("--adaptive", "--max-gpus=2", "--gpu-types=h100")
    listing = bare.etc / "penstock_site.lua"
    listing.write_text(listing.read_text().replace('["t4"]', '["h100"]'))
    assert bare.submit("--adaptive", "--max-gpus=2", "--gpu-types=h100").admin_comment  # read anew at each submission
    assert "FAILED  penstock_site.lua knows the partitions" in bare.penstock("check").output
    assert "was written" in bare.penstock("sync").output
    bare.slurm.kill_slurmctld()
    conf = bare.slurm.slurm_conf
    conf.write_text(conf.read_text().replace("MessageTimeout=10", "MessageTimeout=2"))  # how long commands try
    kept = listing.read_text()
    assert bare.penstock("sync").exit_code == 1
    assert listing.read_text() == kept


@pytest.mark.parametrize(
    ("name", "hooks"),
    [
        ("penstock.so", {"slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_task_init", "slurm_spank_exit"}),
        ("cloud_runner.so", {"slurm_spank_task_init"}),
    ],
)
def test_a_plugin_exports_its_hooks_alone_and_is_hardened(tmp_path: Path, name: str, hooks: set[str]) -> None:
    if shutil.which("nm") is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("binutils or libslurm-dev is not installed")
    library = tmp_path / name
    library.write_bytes(build_plugin(name=name, werror=True))
    listing = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in listing.splitlines()} == {
        "plugin_name",
        "plugin_type",
        "plugin_version",
        "spank_plugin_version",
        *hooks,
    }
    headers = subprocess.run(["readelf", "-lWd", library], capture_output=True, text=True, check=True).stdout
    assert "GNU_RELRO" in headers
    assert "NOW" in headers
    assert "GNU_STACK      0x000000 0x0000000000000000 0x0000000000000000 0x000000 0x000000 RW " in headers
