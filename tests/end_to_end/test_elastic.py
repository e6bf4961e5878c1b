"""PyTorch training in real jobs. The daemon moves them in the middle of an epoch, and the result is unchanged."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.api.client import Client
from penstock_slurm.act.steps import STUCK
from penstock_slurm.gateway.abilities import FILE
from tests.end_to_end.site import Site
from tests.executor.elastic import (
    PYTHON,
    SCRIPT,
    assert_each_sample_once,
    environment,
    final,
    largest_difference,
    steps,
    surviving,
)
from tests.executor.spool import process

pytestmark = pytest.mark.slurm

SIZE, EPOCHS = 2003, 2

SPEEDS = {"1": 1.0, "2": 3.0, "4": 9.0}
"""So steep that a move is soon worth its measured pause, which may be 40 s on a busy machine: at three times the speed, once
the job is twice as old as its pause is long (`restart_factor`)."""

SETTINGS = {"round_s": 1.0, "restart_cost_s": 0.1, "check_claims": False}
"""`SPEEDS` are not true, and a claim that is checked moves no job so soon."""


WAYS = {
    "srun": "srun --overcommit --ntasks=$((SLURM_NNODES * SLURM_GPUS_ON_NODE)) --ntasks-per-node=$SLURM_GPUS_ON_NODE "
    f"{shlex.quote(PYTHON)} ",
    "launch": f"srun --ntasks-per-node=1 --cpu-bind=none {shlex.quote(PYTHON)} -m penstock_executor.launch ",
}
"""How the processes are started: by Slurm, or by a launcher on each node."""

GIVES_UP = (
    "srun --wait=0 --ntasks-per-node=1 --cpu-bind=none "
    f"{shlex.quote(PYTHON)} -m penstock_executor.launch --gives-up-nodes "
)


def submit(site: Site, folder: Path, way: str, *options: str, **spec: object) -> str:
    folder.mkdir()
    fields = {"max_gpus": 4, "goodput_table": {"t4": SPEEDS}} | spec
    arguments = [str(SCRIPT), str(folder), f"--size={SIZE}", f"--epochs={EPOCHS}", *options]
    script = f"exec {WAYS.get(way, way)}{shlex.join(arguments)}"
    return site.sbatch(
        *("--hold", "--requeue", "--gres=gpu:1", f"--comment={json.dumps({'penstock': fields})}"),
        *("--open-mode=append", f"--output={site.folder}/%j.out", f"--wrap={script}"),
    )


def worlds(folder: Path) -> list[int]:
    """Number of processes of each run that made a step, in order."""
    seen: dict[int, int] = {}
    for record in steps(folder):
        seen.setdefault(record["run"], record["world"])
    return [seen[run] for run in sorted(seen)]


def plain(site: Site, gpus: int) -> str:
    """A plain job, which Slurm starts by itself."""
    return site.sbatch(f"--gres=gpu:{gpus}", "--output=/dev/null", "--wrap=sleep 3600")


def resize(site: Site, folder: Path, one: str, two: str) -> None:
    """1 -> 2 -> 4 -> 1: plain jobs hold three of four GPUs, release them, and one plain job takes three again. Then training
    speeds up."""

    def until(expected: list[int]) -> None:
        def details() -> str:
            return "\n".join(
                [str(worlds(folder)), site.tail(), *(each.read_text() for each in site.folder.glob("*.out"))]
            )

        wait_for(lambda: worlds(folder) == expected, 180, f"sizes {expected}", details=details)
        count = len(steps(folder))
        wait_for(lambda: len(steps(folder)) > count + 4 * expected[-1], 120, "some steps", details=details)

    until([1])
    site.slurm.command("scancel", one)
    until([1, 2])
    site.slurm.command("scancel", two)
    until([1, 2, 4])
    three = plain(site, 3)
    until([1, 2, 4, 1])
    assert site.states(three) == {three: "RUNNING"}
    (folder / "fast").touch()


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_resized_in_mid_epoch_the_parameters_are_those_of_a_run_that_was_not(
    make_loopback: Callable[..., LoopbackCluster], make_site: Callable[..., Site], tmp_path: Path, way: str
):
    """Batch 32 on 1, 2, 4 and 1 processes: each step has the same samples, so only the order of additions differs.

    In double precision that is about 1e-16 per step. 1e-9 is far above the sum of 126 steps, and far below the effect of one
    more sample.
    """
    site = make_site(make_loopback("t4:1x4"), **SETTINGS)
    site.slurm_settings["plain_patience_s"] = 1.0
    others = plain(site, 1), plain(site, 2)
    site.wait_states("RUNNING", *others)
    site.start()
    moved, alone = tmp_path / "moved", tmp_path / "alone"
    job = submit(site, moved, way, "--sleep=1.0", adaptivity="strong-scaling", batch_size=32)
    resize(site, moved, *others)
    site.wait_states("COMPLETED", job, timeout_s=120)
    alone.mkdir()
    with process(SCRIPT, alone, f"--size={SIZE}", f"--epochs={EPOCHS}", environment=environment()) as child:
        child.communicate(timeout=120)
    for folder in (moved, alone):
        assert_each_sample_once(folder, EPOCHS, SIZE)
    ends = {}
    for record in surviving(moved):
        ends[record["run"]] = record["epoch"], record["step"] + 1
    assert any(step % 63 for _, step in list(ends.values())[:-1]), f"no run ended in the middle of an epoch: {ends}"
    assert final(moved)["steps"] == final(alone)["steps"] == EPOCHS * 63
    assert largest_difference(final(moved)["weights"], final(alone)["weights"]) < 1e-9
    assert final(moved)["loss"] == pytest.approx(final(alone)["loss"], abs=1e-9)
    starts = [gpus for _, gpus, _ in site.starts(job)]
    assert starts == [1, 2, 4, 1]
    assert site.log.read_text().count("event=pause") == 3, "each move's pause was measured, and charged to the next"
    site.assert_progress_kept(job, lost=0.0)
    site.assert_no_run_twice(job)


def test_a_run_gives_up_a_node_in_place(
    make_loopback: Callable[..., LoopbackCluster], make_site: Callable[..., Site], tmp_path: Path
):
    """A plain job needs the second of two nodes. The run goes on on the first, without a restart in Slurm, from the step after
    its last one. The job ends as completed."""
    site = make_site(make_loopback("t4:2x1"), **SETTINGS)
    folder, job = on_all_nodes(site, tmp_path, 2)
    before = site.job(job).restarts
    give_up(site, folder, "t4-01", [2, 1])
    shrunk = site.job(job)
    assert (shrunk.state, shrunk.nodes, shrunk.restarts) == ("RUNNING", ("t4-00",), before)
    (folder / "fast").touch()
    site.wait_completed(job)
    assert_each_sample_once(folder, EPOCHS, SIZE)
    made = steps(folder)
    last_run = made[-1]["run"]
    assert max(record["step"] for record in made if record["run"] == last_run - 1) + 1 == min(
        record["step"] for record in made if record["run"] == last_run
    ), "no step is lost or made twice"
    site.assert_no_run_twice(job)


@pytest.mark.long
@pytest.mark.parametrize("accounting", [False, True])
def test_a_run_gives_up_a_second_node_where_slurm_can_do_that(
    make_loopback: Callable[..., LoopbackCluster], make_site: Callable[..., Site], tmp_path: Path, accounting: bool
):
    """Slurm 22.05 without slurmdbd refuses it, after the run has left the node. The job is then requeued, and its owner told."""
    site = make_site(make_loopback("t4:3x1", accounting=accounting), **SETTINGS)
    folder, job = on_all_nodes(site, tmp_path, 3)
    before = site.job(job).restarts
    give_up(site, folder, "t4-02", [3, 2])
    again = accounting or site.gateway.version() != (22, 5)
    give_up(site, folder, "t4-01", [2, 1])
    wait_for(lambda: site.states(job) == {job: "RUNNING"}, 120, "the next run", details=site.tail)
    seen = site.job(job)
    assert (seen.nodes, seen.restarts) == (("t4-00",), before + (not again)), site.tail()
    with Client(f"unix:{site.state / 'api.sock'}") as client:
        told = {outcome.text for outcome in client.history(job).outcomes}
    assert any(STUCK.text in text for text in told) == (not again), told
    known = json.loads((site.spool / FILE).read_text()).values()
    assert [(each["shrink"]["works"], each["shrink-again"]["works"]) for each in known] == [(True, again)]
    (folder / "fast").touch()
    site.wait_completed(job)
    assert_each_sample_once(folder, EPOCHS, SIZE)
    site.assert_no_run_twice(job)


def on_all_nodes(site: Site, tmp_path: Path, nodes: int) -> tuple[Path, str]:
    """A job that trains on all nodes, and can give them up."""
    site.slurm_settings["plain_patience_s"] = 1.0
    site.start()
    folder, table = tmp_path / "run", {"t4": {"1": 1.0, "2": 3.0, "3": 9.0}}
    spec = {"max_gpus": nodes, "goodput_table": table, "adaptivity": "strong-scaling", "checkpointable": True}
    job = submit(site, folder, GIVES_UP, "--sleep=0.5", **spec)
    wait_for(lambda: worlds(folder)[-1:] == [nodes], 120, "all nodes", details=site.tail)
    return folder, job


def give_up(site: Site, folder: Path, node: str, expected: list[int]) -> None:
    """A plain job needs this node. `expected`: the sizes of the runs before and after."""
    count = len(steps(folder))
    wait_for(lambda: len(steps(folder)) > count + 10, 120, "some steps", details=site.tail)
    other = site.sbatch("--gres=gpu:1", f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 600")
    site.wait_states("RUNNING", other)
    wait_for(lambda: [*dict.fromkeys(worlds(folder)[-3:])][-2:] == expected, 120, "the next run", details=site.tail)
