"""Actions on running jobs besides stopping: signals, shrinking in place, and repeated starts after Slurm's errors."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_slurm.gateway.abilities import FILE
from penstock_slurm.gateway.base import ENDED
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]

T4 = {"t4": RATES["t4"]}

REPORT = f"{sys.executable} -m penstock_executor.report_command"

WITH_HANDLER = f"""
saved() {{
    request=$({REPORT} poll --epoch $epoch) || return
    echo $SLURM_RESTART_COUNT >>FOLDER/signals
    {REPORT} saved --epoch $epoch --request $request --seconds 0.1 --progress 1
}}
trap saved USR2
epoch=$({REPORT} begin OPTIONS)
while :; do sleep 0.2; done
"""
"""A batch script that reads requests only on the signal."""


def submit(site: Site, script: str, **spec: object) -> str:
    comment = json.dumps({"penstock": {"goodput_table": T4, "checkpointable": True} | spec})
    held = ("--hold", "--requeue", "--gres=gpu:1", "--open-mode=append", f"--output={site.folder}/%j.out")
    return site.sbatch(*held, f"--comment={comment}", f"--wrap={script}")


def begun(site: Site, job: str, runs: int = 1) -> None:
    wait_for(lambda: len(site.starts(job)) == runs, 120, f"run {runs} of job {job}", details=site.tail)


def on_both_nodes(site: Site, job: str) -> int:
    """Wait until it runs on both nodes; the number of runs that have begun. It measures nothing, so it begins on four GPUs, and
    doubles. On a busy machine the first run may be stopped while its first line still waits for Python."""
    wait_for(lambda: [start[1] for start in site.starts(job)][-1:] == [8], 120, "both nodes", details=site.tail)
    assert (site.job(job).nodes, site.job(job).restarts) == (("t4-00", "t4-01"), 1)
    return len(site.starts(job))


def test_only_a_job_whose_handler_has_registered_gets_a_signal(
    make_loopback: MakeLoopback, make_site: MakeSite
) -> None:
    """Both trap the signal, and both are moved off their node. Only the job that registered a handler gets it, saves and
    answers."""
    site = make_site(make_loopback("t4:2x4"))
    site.slurm_settings["checkpoint_wait_s"] = 30
    site.start()
    script = WITH_HANDLER.replace("FOLDER", str(site.folder))
    registered = submit(site, script.replace("OPTIONS", "--usr2=batch"), min_gpus=1, max_gpus=1)
    silent = submit(site, f"trap 'echo signal >{site.folder}/unasked' USR2; while :; do sleep 0.2; done", max_gpus=1)
    begun(site, registered)
    site.wait_states("RUNNING", registered, silent)
    pause(1.0)
    nodes = {node for job in (registered, silent) for node in site.job(job).nodes}
    assert len(nodes) == 1, "both on one node, the fewest possible"
    node = nodes.pop()
    options = (
        "ReservationName=work",
        "StartTime=now",
        "Duration=60",
        f"Nodes={node}",
        "Users=root",
        "Flags=IGNORE_JOBS",
    )
    site.slurm.command("scontrol", "create", "reservation", *options)
    begun(site, registered, 2)
    wait_for(lambda: site.states(silent) == {silent: "RUNNING"} and node not in site.job(silent).nodes, 120, "a move")
    assert (site.folder / "signals").read_text().split() == [], "an unset restart count, once"
    assert (site.folder / "signals").read_text().count("\n") == 1
    assert not (site.folder / "unasked").exists()
    log = site.log.read_text()
    assert re.search(rf"job={registered} .*text=\"has saved, leaves its GPUs\"", log)
    assert re.search(rf"job={silent} .*text=\"gets Slurm's signals to save, leaves its GPUs\"", log)


def test_a_job_that_survives_it_gives_nodes_back_in_place(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    """A plain job needs the second of two nodes. The batch script continues on the first, without a restart."""
    site = make_site(make_loopback("t4:2x4"))
    site.slurm_settings |= {"plain_patience_s": 1.0, "checkpoint_wait_s": 2.0}
    site.start()
    script = f"epoch=$({REPORT} begin OPTIONS); while :; do sleep 1; done"
    job = submit(site, script.replace("OPTIONS", "--survives-losing-nodes"), min_gpus=4, max_gpus=8)
    begun(site, job)
    runs = on_both_nodes(site, job)
    plain = site.sbatch("--gres=gpu:4", "--nodelist=t4-01", "--output=/dev/null", "--wrap=sleep 600")
    site.wait_states("RUNNING", plain)
    shrunk = site.job(job)
    assert (shrunk.state, shrunk.nodes, shrunk.restarts) == ("RUNNING", ("t4-00",), 1)
    assert len(site.starts(job)) == runs
    wait_for(lambda: "goes on and gives up whole nodes" in site.log.read_text(), 120, "its outcome")
    ((known,),) = [list(each.values()) for each in json.loads((site.spool / FILE).read_text()).values()]
    assert known["works"] is True
    # A job that has not registered this is stopped and restarted.
    site.slurm.command("scancel", job, plain)
    site.wait_states("CANCELLED", job, plain)
    other = submit(site, script.replace("OPTIONS", ""), min_gpus=4, max_gpus=8)
    begun(site, other)
    runs = on_both_nodes(site, other)
    site.sbatch("--gres=gpu:4", "--nodelist=t4-01", "--output=/dev/null", "--wrap=sleep 600")
    begun(site, other, runs + 1)
    assert site.job(other).nodes == ("t4-00",)


@pytest.mark.long
@pytest.mark.parametrize("accounting", [False, True])
def test_a_job_that_slurm_starts_without_its_gpus_is_restarted_with_them(
    make_loopback: MakeLoopback, make_site: MakeSite, accounting: bool
) -> None:
    """Its user requeues it while its node does not respond. The next run has no GPUs (Slurm 22.05.8), the one after it has."""
    site = make_site(make_loopback("t4:2x4", slurmd_timeout_s=6, accounting=accounting))
    site.start()
    job = site.submit(10_000, rates=T4, min_gpus=2, max_gpus=2)
    begun(site, job)
    pause(6)  # slurmctld does not check a node earlier
    (node,) = site.job(job).nodes
    site.slurm.kill_slurmd(node)
    wait_for(lambda: "NOT_RESPONDING" in next(n for n in site.gateway.nodes() if n.name == node).state, 120, "silence")
    site.slurm.command("scontrol", "requeue", job)

    def runs_with_gpus() -> bool:
        seen = site.job(job)
        return seen.state == "RUNNING" and node not in seen.nodes and site.gateway.gpus_held(job) == 2

    wait_for(runs_with_gpus, 120, "a run with its GPUs", details=site.tail)
    if site.gateway.version() == (22, 5):
        assert "Slurm started it without its GPUs" in site.log.read_text()
        assert site.job(job).restarts == 2
    wait_for(lambda: site.starts(job)[-1][1] == 2, 120, "its report", details=site.tail)


def test_a_job_that_failed_without_its_gpus_after_a_restart_of_slurmctld_is_brought_back(
    make_loopback: MakeLoopback, make_site: MakeSite
) -> None:
    """Slurm 22.05 starts it on a node that has not registered yet, while no penstockd runs. GPUs are not accounted."""
    site = make_site(make_loopback("t4:1x4"))
    slurm, gate = site.slurm, site.folder / "gate"
    log = slurm.log_folder / "slurmctld.log"
    started = "Allocate JobId={0} |Started JobId={0} "
    waits = f"--wrap=until [ -e {shlex.quote(str(gate))} ]; do sleep 0.1; done"
    plain = site.sbatch("--gres=gpu:1", "--output=/dev/null", waits)
    wait_for(lambda: re.search(started.format(plain), log.read_text()), 120, "the plain job")
    site.start()
    job = site.submit(3.0)
    wait_for(lambda: f"release hold on JobId={job} " in log.read_text(), 120, "the release", details=site.tail)
    slurm.stop_slurmctld()
    site.kill()
    in_time = re.search(started.format(job), log.read_text())
    slurm.start_slurmctld()
    gate.touch()  # the end of a job makes Slurm look for another one to start
    wait_for(lambda: site.states(job)[job] in ENDED, 120, "a run without penstockd")
    lacked = site.gateway.gpus_held(job) == 0
    site.start()
    if lacked:
        wait_for(lambda: site.job(job).restarts == 1, 120, "the next run", details=site.tail)
        reason = "no-gpus: Slurm started it without its GPUs, and it failed; it will start again"
        with Client(f"unix:{site.state / 'api.sock'}") as client:
            # An observation requeues the job, and the round that follows records why.
            wait_for(lambda: [each.stop for each in client.history(job).outcomes if each.stop] == [reason], 120, "why")
    site.wait_completed(job)
    assert lacked or in_time or site.gateway.version() != (22, 5)


def test_a_job_that_fails_with_its_gpus_stays_failed(loopback: LoopbackCluster, make_site: MakeSite) -> None:
    """GPUs are not accounted, so penstockd asks Slurm whether the run had them."""
    site = make_site(loopback)
    site.start()
    job = submit(site, "sleep 0.5; exit 3")
    site.wait_states("FAILED", job)
    before = site.wait_round()
    site.wait_round(after=site.wait_round(after=before))
    assert (site.job(job).state, site.job(job).restarts) == ("FAILED", 0)
    assert site.gateway.gpus_held(job) == 1
