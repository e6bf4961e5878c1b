"""Scripts that others wrote, each moved five times by penstockd: `python -m benchmarks.foreign --sources FOLDER [NAME ...]`.

FOLDER contains clones of the repositories that `scripts.py` names, at its commits (`git clone URL; git checkout COMMIT`). The
scripts need torchvision, transformers (5), datasets, evaluate, accelerate, lightning, jsonargparse, hydra-core, boto3, and what
torchtitan names.

A script runs once without interruption on one process. Then it runs on a loopback Slurm with four emulated GPUs. penstockd
resizes the job between one and four of them, five times, because plain jobs come and go. The job must complete, each run must
begin with the sample after the last one of the run before (if that one was killed, with what it had reported as saved, or
later), and the last loss must be the same but for chance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.foreign.scripts import DIFFS, SCRIPTS, Script
from tests.end_to_end.site import Site

from penstock_loopback import LoopbackCluster, wait_for
from penstock_profiles.wire import Checkpointed, Ended, Observation, Started

SPEEDS = {"t4": {"1": 1.0, "2": 3.0, "4": 9.0}}
MOVES = 5
PATIENCE_S = 1800
"""Longest wait for a move, s. Starting four processes of PyTorch takes minutes beside other tests."""
DIFFERENCE = 0.1
"""How much the last loss may differ, as a share."""
SMALL = 0.05
"""A loss below this is as good as another: the made-up data are easy."""


class Failed(Exception):
    """A script has not done what it should."""


def lay_out(sources: Path, folder: Path, name: str) -> Path:
    """Copy the script's folder, change the lines, and make the data. Returns the script's folder."""
    script = SCRIPTS[name]
    source = sources / script.repository.folder / script.path
    if not source.is_file():
        raise SystemExit(
            f"{source} is missing: git clone {script.repository.url}, then checkout {script.repository.commit}"
        )
    place = folder / "a" / "b" / "c" / source.parent.name
    shutil.copytree(source.parent, place, ignore=shutil.ignore_patterns(".git"))
    for kind in ("here", "elastic"):
        if (diff := DIFFS / f"{name}.{kind}.diff").exists():
            subprocess.run(["patch", "-p1", "--quiet", "-i", diff], cwd=place, check=True)
    script.prepare(place)
    return place


def command(script: Script, pause_s: float = 0, while_there_is: Path = Path("nothing")) -> str:
    """A shell's command, in the script's folder, that starts it with a process for each GPU.

    Args:
        pause_s: pause after each step, while there is a file `while_there_is`.
    """
    imports = " ".join(f"--import {name}" for name in ("pause", *script.imports))
    settings = (
        f"FOREIGN_PAUSE_S={pause_s} FOREIGN_PAUSE_WHILE={while_there_is} PYTHONPATH={Path(__file__).parent}:$PYTHONPATH"
        " OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1"
    )
    srun = "${SLURM_JOB_ID:+srun --ntasks-per-node=1 --cpu-bind=none}"
    launch = f"{sys.executable} -m penstock_executor.launch {imports}"
    return f"export {settings}; exec {srun} {launch} {Path(script.path).name} {script.options}"


def last_loss(script: Script, output: str) -> float:
    """The last loss that the script has printed."""
    found = re.findall(script.loss, output, re.MULTILINE)
    if not found:
        raise Failed(f"{script.path} has printed no loss:\n{output[-4000:]}")
    return float(found[-1])


def uninterrupted(script: Script, place: Path) -> float:
    """The last loss of a run on one process, without Slurm."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", "-c", command(script)],
        cwd=place,
        env=environ,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise Failed(f"{script.path} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return last_loss(script, done.stdout)


def moved(script: Script, place: Path, folder: Path) -> dict[str, object]:
    """What a run that penstockd moves five times has printed and reported."""
    with LoopbackCluster(folder / "slurm", "t4:1x4") as slurm:
        # The pause after each step makes all numbers of GPUs equally fast, so that the table is wrong.
        site = Site(slurm, folder, round_s=1.0, restart_cost_s=0.1, check_claims=False)
        site.slurm_settings["plain_patience_s"] = 1.0

        def plain() -> str:
            return site.sbatch("--gres=gpu:3", "--output=/dev/null", "--wrap=sleep 3600")

        going = folder / "going"
        going.touch()
        other = plain()
        site.wait_states("RUNNING", other)
        site.start()
        spec = {
            "max_gpus": 4,
            "goodput_table": SPEEDS,
            "adaptivity": "strong-scaling",
            "batch_size": 16,
            "checkpointable": True,
        }
        began_s = time.monotonic()
        job = site.sbatch(
            *("--hold", "--requeue", "--gres=gpu:1", f"--comment={json.dumps({'penstock': spec})}", f"--chdir={place}"),
            *("--open-mode=append", f"--output={folder}/job.out", f"--wrap={command(script, script.pause_s, going)}"),
        )

        def trains(gpus: int, after: int) -> int:
            """Wait for a run on so many GPUs later than the `after`th, and for its first report; its number."""

            def newest() -> int:
                if site.states(job).get(job) in ("FAILED", "COMPLETED"):
                    raise Failed(f"the job ended before {MOVES} moves:\n{site.tail()}")
                said = [(report.epoch, report.body) for report in site.reports(job)]
                good = [n for n, body in said if n > after and isinstance(body, Observation) and body.gpus == gpus]
                return max(good, default=0)

            return int(wait_for(newest, PATIENCE_S, f"training on {gpus} GPUs", details=site.tail))

        try:
            run = trains(1, 0)
            for n in range(MOVES):
                if n % 2 == 0:
                    slurm.command("scancel", other)
                    run = trains(4, run)
                else:
                    other = plain()
                    run = trains(1, run)
            going.unlink()
            site.wait_completed(job, timeout_s=900)
        finally:
            slurm.command("scancel", job, check=False)
            site.stop()
        reports = site.reports(job)
    bodies = [report.body for report in reports]
    starts = [body for body in bodies if isinstance(body, Started)]
    ends = [body for body in bodies if isinstance(body, Ended)]
    runs = sorted({report.epoch for report in reports if isinstance(report.body, Started)})
    began, ended = (
        {each.epoch: each.body.progress for each in reports if isinstance(each.body, kind)} for kind in (Started, Ended)
    )
    saved = {each.epoch: each.body.progress for each in reports if isinstance(each.body, Checkpointed)}
    gaps = [began[after] - ended[before] for before, after in pairwise(runs) if before in ended]
    gaps += [min(began[after] - saved.get(before, 0), 0) for before, after in pairwise(runs) if before not in ended]
    return {
        "gpus": [sum(map(len, body.gpu_ids.values())) for body in starts],
        "resizes": sum(a.gpu_ids != b.gpu_ids for a, b in pairwise(starts)),
        "killed": len(set(runs) - ended.keys()),
        "samples": ends[-1].progress,
        "of": starts[-1].total,
        "lost_or_doubled": max(map(abs, gaps), default=0.0),
        "loss": last_loss(script, (folder / "job.out").read_text(errors="replace")),
        "seconds": round(time.monotonic() - began_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, metavar="FOLDER", help="contains the clones")
    moved_ones = [name for name, script in SCRIPTS.items() if script.loss]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=moved_ones, default=moved_ones)
    options = parser.parse_args()
    failed = []
    for name in options.names:
        script = SCRIPTS[name]
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
                alone = uninterrupted(script, lay_out(options.sources, Path(folder) / "alone", name))
                said = moved(script, lay_out(options.sources, Path(folder) / "moved", name), Path(folder))
        except Failed as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        print(
            json.dumps({"script": name, "added_lines": script.added(name), "uninterrupted": alone} | said), flush=True
        )
        same = math.isclose(said["loss"], alone, rel_tol=DIFFERENCE, abs_tol=SMALL)
        if said["resizes"] < MOVES or said["lost_or_doubled"] or not same:
            failed.append(name)
    if failed:
        raise SystemExit(f"differs: {', '.join(failed)}")


if __name__ == "__main__":
    main()
