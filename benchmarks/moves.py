"""What a move of a running PyTorch job costs, part by part: `python -m benchmarks.moves [--trials N] [--way srun|launch|shrink]`.

A job trains on one of the four GPUs of a loopback Slurm's node. Plain jobs hold the others and end; penstockd then resizes the
job to four GPUs, and plain jobs take three of them back. Each part ends with a moment that a process writes down:

| part | ends |
| --- | --- |
| save | when the run that is stopped has ended: the request, the checkpoint, the last step |
| slurm | when the batch script of the next run begins: requeue, the daemon, slurmctld, slurmd |
| start | when the last of its processes begins: srun, Python itself |
| import | when the last has imported PyTorch and the executor |
| join | when the last has joined the process group and claimed its epoch |
| restore | when the last has loaded the checkpoint |
| step | when the first optimiser step is done |

With `--way shrink`, the job trains on two nodes of one GPU each, and a plain job needs the second: the run gives it up in place,
so there is no part `slurm`.

GPUs are emulated, so nothing of a GPU's own start is in the figures. penstockd, Slurm and the job share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from tests.end_to_end.site import Site

from penstock_loopback import LoopbackCluster, wait_for

SPEEDS = {"1": 1.0, "2": 3.0, "4": 9.0}
PARTS = ("save", "slurm", "start", "import", "join", "restore", "step")
WAYS = {
    "srun": "exec srun --overcommit --ntasks=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))"
    " --ntasks-per-node=$SLURM_GPUS_ON_NODE {python} {script}",
    "launch": "exec srun --ntasks-per-node=1 --cpu-bind=none {python} -m penstock_executor.launch {script}",
    "shrink": "exec srun --wait=0 --ntasks-per-node=1 --cpu-bind=none {python}"
    " -m penstock_executor.launch --gives-up-nodes {script}",
}

SCRIPT = """
import json, os, time
began_s = time.time()
import torch
import penstock_executor as px
px.start
imported_s = time.time()
run = px.start(os.environ["MARKS"] + "/checkpoints", report_every_s=1)
joined_s = time.time()
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
data = torch.utils.data.TensorDataset(torch.randn(10_000, 256))
model, opt, loader = run.prepare(model, torch.optim.AdamW(model.parameters()), data, batch_size=32)
moments = {"start": began_s, "import": imported_s, "join": joined_s, "restore": time.time()}
def mark():
    with open(f"{os.environ['MARKS']}/{run.run_epoch}.{run.rank}", "w") as file:
        json.dump({"epoch": run.run_epoch, "world": run.world} | moments, file)
try:
    for _ in run.epochs(10_000):
        for (x,) in loader:
            run.step(model(x).square().mean())
            if "step" not in moments:
                moments["step"] = time.time()
                mark()
            time.sleep(0.1)
finally:
    if "step" in moments:
        moments["end"] = time.time()
        mark()
"""


def moment(text: str) -> float:
    """Seconds since 1970 of a timestamp in penstockd's log."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def decisions(site: Site, job: str) -> list[float]:
    """When penstockd decided each resize of the job."""
    found: dict[str, float] = {}
    for line in site.log.read_text().splitlines():
        words = line.split()
        if {f"job={job}", "event=action", "action=resize"} <= set(words):
            number = next(each for each in words if each.startswith("round="))
            found.setdefault(number, moment(words[0].partition("=")[2]))
    return list(found.values())


def marks(folder: Path) -> dict[int, list[dict[str, float]]]:
    """What the processes of each run wrote down, by the run's epoch."""
    found: dict[int, list[dict[str, float]]] = {}
    for path in folder.glob("[0-9]*.[0-9]*"):
        try:
            said = json.loads(path.read_text())
        except ValueError:
            continue  # just being written
        found.setdefault(said["epoch"], []).append(said)
    return found


def parts(site: Site, job: str, before: int, after: int, *, in_place: bool) -> dict[str, float]:
    """The parts of one move, s."""
    runs = marks(site.folder)
    ended_s = max(said["end"] for said in runs[before])
    decided_s = max(at_s for at_s in decisions(site, job) if at_s < ended_s)
    started_s = max(said["start"] for said in runs[after])
    shell_s = max(at_s for at_s in map(float, (site.folder / "shells").read_text().split()) if at_s < started_s)
    names = ("start", "import", "join", "restore", "step")
    requeued = [] if in_place else [shell_s]
    moments = [decided_s, ended_s, *requeued, *(max(said[name] for said in runs[after]) for name in names)]
    named = [part for part in PARTS if part != "slurm" or not in_place]
    found = {part: end - begin for part, (begin, end) in zip(named, pairwise(moments), strict=True)}
    return found | {"all": moments[-1] - decided_s, "stands_still": moments[-1] - ended_s}


def measure(folder: Path, way: str, trials: int) -> list[dict[str, float]]:
    """Grow one job from 1 to 4 GPUs, or let it give up one of two nodes, `trials` times."""
    in_place = way == "shrink"
    wide = 2 if in_place else 4
    found: list[dict[str, float]] = []
    (folder / "script.py").write_text(SCRIPT)
    with LoopbackCluster(folder / "slurm", "t4:2x1" if in_place else "t4:1x4") as slurm:
        site = Site(slurm, folder, round_s=1.0, restart_cost_s=0.1)
        site.slurm_settings["plain_patience_s"] = 1.0

        def plain() -> str:
            gpus = ("--gres=gpu:1", "--nodelist=t4-01") if in_place else ("--gres=gpu:3",)
            return site.sbatch(*gpus, "--output=/dev/null", "--wrap=sleep 3600")

        def runs(world: int, after: int) -> int:
            """Wait for a run of so many processes later than `after`; its epoch."""

            def newest() -> int | None:
                good = [e for e, said in marks(folder).items() if e > after and len(said) == said[0]["world"] == world]
                return max(good, default=None)

            wait_for(lambda: newest() is not None, 240, f"a run on {world} GPUs", details=site.tail)
            return newest() or 0

        other = plain()
        site.wait_states("RUNNING", other)
        site.start()
        spec = {"max_gpus": wide, "goodput_table": {"t4": SPEEDS}, "adaptivity": "strong-scaling", "batch_size": 32}
        command = WAYS[way].format(python=sys.executable, script=folder / "script.py")
        script = f"date +%s.%N >> {folder}/shells; export MARKS={folder} OMP_NUM_THREADS=1; {command}"
        job = site.sbatch(
            *("--hold", "--requeue", "--gres=gpu:1", f"--comment={json.dumps({'penstock': spec})}"),
            *("--open-mode=append", f"--output={folder}/job.out", f"--wrap={script}"),
        )
        try:
            epoch = 0
            for _ in range(trials):
                small = runs(1, epoch - in_place)  # after a shrink, the run goes on
                time.sleep(5)  # some steps and reports
                slurm.command("scancel", other)
                before, epoch = small, runs(wide, small)
                if in_place:
                    time.sleep(5)
                    other = plain()
                    before, epoch = epoch, runs(1, epoch)
                    site.wait_states("RUNNING", other)
                wait_for(lambda before=before: all("end" in said for said in marks(folder)[before]), 30, "its end")
                found.append(parts(site, job, before, epoch, in_place=in_place))
                print(
                    json.dumps({"way": way} | {name: round(value, 2) for name, value in found[-1].items()}), flush=True
                )
                if not in_place:
                    other = plain()
        finally:
            slurm.command("scancel", job, check=False)
            site.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=list(WAYS))
    options = parser.parse_args()
    for way in options.way:
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            found = measure(Path(folder), way, options.trials)
        medians = {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}
        print(json.dumps({"way": way, "trials": len(found), "load": round(os.getloadavg()[0], 1), "median": medians}))


if __name__ == "__main__":
    main()
