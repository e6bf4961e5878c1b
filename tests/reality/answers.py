"""What each of Slurm's commands that Penstock uses says of a job, an element or an array that waits, is held, runs or is gone.

`.venv/bin/python -m tests.reality.answers >tests/reality/answers-22.05.md` writes the table of this machine's release.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock_loopback import LoopbackCluster, LoopbackError, wait_for

NODES = "t4:2x4"
"""One job holds all of t4-00; jobs run on t4-01."""

PATIENCE_S = 4
"""`scancel --signal` tries again and again while a job has not started."""

WAITS = ("--nodelist=t4-00", "--wrap=sleep 600")
RUNS = ("--nodelist=t4-01", "--wrap=sleep 600")
ENDS = ("--nodelist=t4-01", "--wrap=true")
ARRAY = "--array=1-2"

Ask = Callable[[str], tuple[str, ...]]

COMMANDS: dict[str, Ask] = {
    "squeue": lambda job: ("squeue", "-a", "-h", "-r", "--local", "-o", "%T %r", "-j", job),
    "scontrol show job": lambda job: ("scontrol", "-a", "-o", "show", "job", job),
    "scontrol update": lambda job: ("scontrol", "update", f"JobId={job}", "Comment=x"),
    "scontrol hold": lambda job: ("scontrol", "hold", job),
    "scontrol release": lambda job: ("scontrol", "release", job),
    "scontrol requeuehold": lambda job: ("scontrol", "requeuehold", job),
    "scontrol suspend": lambda job: ("scontrol", "suspend", job),
    "scontrol resume": lambda job: ("scontrol", "resume", job),
    "scancel -v": lambda job: ("scancel", "-v", job),
    "scancel -v --signal": lambda job: ("scancel", "-v", "--signal=USR2", "--batch", job),
}


class Subjects:
    """Makes a job, element or array in each state, a new one for each question."""

    def __init__(self, cluster: LoopbackCluster) -> None:
        self.cluster = cluster
        self._sbatch("--nodelist=t4-00", "--exclusive", "--wrap=sleep 600")

    def _sbatch(self, *options: str) -> str:
        argv = ("sbatch", "--parsable", "--requeue", "-n1", "--output=/dev/null", *options)
        return self.cluster.command(*argv).stdout.strip()

    def _until(self, state: str, job: str) -> str:
        def reached() -> bool:
            done = self.cluster.command("squeue", "-hra", "-t", "all", "-o", "%T", "-j", job, check=False)
            return set(done.stdout.split()) == {state}

        wait_for(reached, 60, f"{job} to be {state}")
        return job

    def all(self) -> dict[str, Callable[[], str]]:
        """The name of a subject -> makes one, and returns what a command calls it."""
        return {
            "job that waits": lambda: self._sbatch(*WAITS),
            "held job": lambda: self._sbatch("--hold", *WAITS),
            "running job": lambda: self._until("RUNNING", self._sbatch(*RUNS)),
            "ended job": lambda: self._until("COMPLETED", self._sbatch(*ENDS)),
            "forgotten job": lambda: "99999",
            "array that waits": lambda: self._sbatch(ARRAY, *WAITS),
            "held array": lambda: self._sbatch(ARRAY, "--hold", *WAITS),
            "running array": lambda: self._until("RUNNING", self._sbatch(ARRAY, *RUNS)),
            "ended array": lambda: self._until("COMPLETED", self._sbatch(ARRAY, *ENDS)),
            "element that waits": lambda: self._sbatch(ARRAY, *WAITS) + "_1",
            "held element": lambda: self._sbatch(ARRAY, "--hold", *WAITS) + "_1",
            "running element": lambda: self._until("RUNNING", self._sbatch(ARRAY, *RUNS)) + "_1",
            "ended element": lambda: self._until("COMPLETED", self._sbatch(ARRAY, *ENDS)) + "_1",
            "element that is not of the array": lambda: self._sbatch(ARRAY, *WAITS) + "_7",
        }


def shown(text: str, job: str) -> str:
    """A command's answer on one line, with the numbers of jobs replaced."""
    found = re.findall(r"JobId=\S+ (?:ArrayJobId=\S+ )?(?:ArrayTaskId=\S+ )?|JobState=\S+ Reason=\S+", text)
    if found:
        text = "; ".join(each for each in found if each.startswith("JobState"))
    text = re.sub(r"(PENDING (?:Reason=)?)(?:Priority|Resources|None)", r"\1none of its own", text)
    lines = [re.sub(r"^\w+: (?:error: )?", "", line).strip() for line in text.splitlines() if "select/" not in line]
    number = job.partition("_")[0]
    line = "; ".join(dict.fromkeys(line.replace(job, "J").replace(number, "J") for line in lines if line))
    return re.sub(r"\b\d{1,5}(?=[_ :.,)]|$)", "N", line).replace("|", "\\|")


def answers(cluster: LoopbackCluster) -> Iterator[tuple[str, str, str]]:
    """Subject, command, and the answer with the exit status in front."""
    for subject, make in Subjects(cluster).all().items():
        for command, ask in COMMANDS.items():
            job = make()
            try:
                done = cluster.command(*ask(job), check=False, timeout_s=PATIENCE_S)
                answer = f"{done.returncode} {shown(done.stdout + done.stderr, job)}".strip()
            except LoopbackError:
                answer = f"no answer within {PATIENCE_S} s"
            yield subject, command, answer
            cluster.command("scancel", job.partition("_")[0], check=False)


def table(cluster: LoopbackCluster) -> str:
    """The table as Markdown, one for each command."""
    release = cluster.command("scontrol", "-V").stdout.split()[1]
    found: dict[str, list[str]] = {command: [] for command in COMMANDS}
    for subject, command, answer in answers(cluster):
        found[command].append(f"| {subject} | {answer} |")
    text = [f"# What Slurm {release} says of jobs, elements and arrays", ""]
    text += ["The exit status, then what the command printed. J is the job asked for, N another number.", ""]
    for command, lines in found.items():
        text += [f"## {command}", "", "| asked for | answer |", "| --- | --- |", *lines, ""]
    return "\n".join(text).rstrip() + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, LoopbackCluster(Path(folder) / "slurm", NODES) as slurm:
        sys.stdout.write(table(slurm))
