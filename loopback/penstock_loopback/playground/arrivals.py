"""The playground's users: submits a job whenever few jobs wait, so that there is always a queue.

    python -m penstock_loopback.playground.arrivals FOLDER

It runs until the playground goes down. Everything that decides is Slurm and penstockd; this process only submits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock_loopback import LoopbackCluster, LoopbackError
from penstock_profiles.families import Families, load_families

WAITING = 6
"""A job is submitted while fewer than so many wait."""
EACH_S = 5.0
"""Seconds between two looks at the queue, and so the shortest time between two submissions."""
KEPT = 1000
"""Newest outputs, and checkpoints, that stay. No job runs for as long as so many others need to come."""
LOG_BYTES = 16 * 2**20
"""Most bytes of a daemon's log. A longer one loses its older half."""
PLAIN_S = (120, 600)
"""Least and most seconds that a plain job runs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Jobs that are alike but for their length."""

    name: str
    family: str
    spec: dict[str, Any]
    t4_minutes: float
    """Mean work, as minutes on one T4. A job has half of it to one and a half times as much."""

    def submission(self, families: Families, share: float, folder: Path) -> list[str]:
        """sbatch's arguments for a job with this share of the mean work."""
        fixed = self.spec.get("adaptivity", "adaptive") != "adaptive"
        one_t4 = float(
            families[self.family].estimator(fixed_batch=fixed).goodput("t4", np.array([1]), np.array([1]))[0]
        )
        trainer = [
            sys.executable,
            *("-m", "penstock_executor.emulated", f"--family={self.family}"),
            f"--work={share * self.t4_minutes * 60 * one_t4:.6g}",
            *("--time-scale=1", "--start-seconds=1", "--save-seconds=0.3", "--report-every=5"),
            *(["--fixed-batch"] if fixed else []),
        ]
        script = f"exec {shlex.join(trainer)} --checkpoint-dir={shlex.quote(str(folder))}/checkpoints/$SLURM_JOB_ID"
        spec = {"model_family": self.family, "checkpointable": True} | self.spec
        comment = f"--comment={json.dumps({'penstock': spec})}"
        return [f"--job-name={self.name}", "--hold", "--requeue", "--gres=gpu:1", comment, "--wrap", script]


KINDS = (
    Kind("imagenet-resnet50", "resnet50-imagenet", {"min_gpus": 4, "max_gpus": 16}, 90),
    Kind("squad-bert", "bert-squad", {"min_gpus": 2, "max_gpus": 16}, 120),
    Kind("cifar-resnet18", "resnet18-cifar10", {"max_gpus": 8}, 30),
    Kind("speech-deepspeech2", "deepspeech2", {"min_gpus": 2, "max_gpus": 8}, 20),
    Kind("yolo-v3", "yolov3", {"max_gpus": 4}, 10),
    Kind("squad-eight-or-more", "bert-squad", {"min_gpus": 8, "max_gpus": 16}, 150),
    Kind("imagenet-rigid", "resnet50-imagenet", {"min_gpus": 4, "max_gpus": 4, "adaptivity": "rigid"}, 40),
    Kind("squad-strong-scaling", "bert-squad", {"min_gpus": 2, "max_gpus": 4, "adaptivity": "strong-scaling"}, 30),
    Kind("imagenet-not-preemptible", "resnet50-imagenet", {"min_gpus": 4, "max_gpus": 8, "preemptible": False}, 40),
    Kind("speech-on-rtx-only", "deepspeech2", {"min_gpus": 2, "max_gpus": 4, "gpu_types": ["rtx"]}, 15),
    Kind("cifar-not-on-a100", "resnet18-cifar10", {"min_gpus": 4, "max_gpus": 8, "excluded_gpu_types": ["a100"]}, 40),
)
"""Each differs in what Penstock may do with it. One of each needs 34 GPUs, so that some 15 jobs fill the playground's 48."""

PLAIN = "plain-slurm-job"
REFUSED = "spec-with-a-mistake"


class Arrivals:
    """Submits to a cluster.

    Args:
        cluster: it runs.
        random: draws what is submitted.
    """

    def __init__(self, cluster: LoopbackCluster, random: random.Random) -> None:
        self._cluster, self._random, self._families = cluster, random, load_families()
        self._plain_types = sorted({node.gpu_type for node in cluster.nodes})
        self._next = 0

    def refused(self) -> None:
        """Submit a job whose job spec penstockd refuses, so that the page has one to show. It waits until it is cancelled."""
        self._submit([f"--job-name={REFUSED}", "--hold", '--comment={"penstock": {"max_gpus": 0}}', "--wrap", "true"])

    def look(self) -> None:
        """Submit a job if few wait: of each kind in turn, and a plain one after each turn. Keeps the logs short."""
        for ending in ("*.log", "*.err", "jobcomp.txt"):
            for path in self._cluster.log_folder.glob(ending):
                shorten(path)
        names = self._cluster.command("squeue", "-h", "-t", "PENDING", "-o", "%j").stdout.split()
        if sum(name != REFUSED for name in names) >= WAITING:
            return
        forget_old(self._cluster.log_folder.glob("*-*.out"))
        forget_old(self._cluster.folder.glob("checkpoints/*"))
        at, self._next = self._next % (len(KINDS) + 1), self._next + 1
        if at == len(KINDS):
            kind, seconds = self._random.choice(self._plain_types), self._random.randint(*PLAIN_S)
            self._submit([f"--job-name={PLAIN}", f"--gres=gpu:{kind}:1", "--wrap", f"exec sleep {seconds}"])
        else:
            share = self._random.uniform(0.5, 1.5)
            self._submit(KINDS[at].submission(self._families, share, self._cluster.folder))

    def _submit(self, arguments: Sequence[str]) -> None:
        environment = os.environ | self._cluster.user_environment()
        output = f"--output={self._cluster.log_folder}/%x-%j.out"
        subprocess.run(
            ["sbatch", "--parsable", output, *arguments],
            env=environment,
            cwd=self._cluster.folder,
            stdout=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )


def forget_old(paths: Iterable[Path]) -> None:
    """Delete all but the newest `KEPT` of these files and folders."""
    for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def shorten(log: Path, most: int = LOG_BYTES) -> None:
    """Cut off the older half of a log if it is longer than `most` bytes.

    Its daemon has it open and appends, so the file stays and its content moves. What it writes in this moment may be lost.
    """
    with log.open("rb+") as file:
        if file.seek(0, os.SEEK_END) <= most:
            return
        file.seek(-(most // 2), os.SEEK_END)
        file.readline()  # the rest of a line
        newest = file.read()
        file.seek(0)
        file.write(newest)
        file.truncate()


def main() -> None:
    """Submit until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arrivals = Arrivals(LoopbackCluster.open(parser.parse_args().folder), random.Random())  # noqa: S311
    begun = False
    while True:
        try:
            if not begun:
                arrivals.refused()
                begun = True
            arrivals.look()
        except (LoopbackError, subprocess.SubprocessError) as error:  # Slurm is busy
            print(error, file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(EACH_S)


if __name__ == "__main__":
    main()
