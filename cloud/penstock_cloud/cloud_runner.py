"""penstock-cloud-runner: represents a detached run on a gateway node. The instance of the run has no network to the site.

The plugin cloud_runner.so starts it in place of the batch script: as the job's user, with the script's environment, folder,
output and signals. It uploads the script and its input files to S3, prints the script's output, downloads the output files, and
exits with the script's exit status. To Slurm and all its tools, the job runs like any other.

The script names its files, with paths inside the job's working directory::

    #PENSTOCK input data train.py
    #PENSTOCK output checkpoints results
    #PENSTOCK container docker://pytorch/pytorch:2.9.1-cuda13.0-cudnn9-runtime

The last line may be left out; with it, the instance's apptainer runs the script in a container. Output files that exist
already are uploaded too, so that a checkpoint travels with its job. A symbolic link is followed.

Only the standard library is used, since hundreds of cloud runners may run on a gateway.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import IO

from penstock_cloud.unpacking import DamagedArchive, Unpacking

LOOK_S = 2.0
"""Seconds between two polls of the run's objects."""

TRIES = 7
"""Attempts at an upload or download that must succeed, over about two minutes."""

ANSWER_S = 60.0
"""How long S3 may take to answer, s."""

UNASKED = (
    "no instance was ordered for this job; submit it to the site's partitions with --burst, and Penstock sends it here"
)
"""Message to a job that was submitted to gateways directly."""

ENDED = (
    "the job's run in the cloud had ended before Slurm started it here; `penstock explain` says why; it is queued again"
)
"""Message to a job that Penstock has sent there: penstockd writes its control message first."""

LEFT = "penstockd did not queue the job again; submit it again"
"""Message to that job if penstockd is away."""

QUEUED_S = 600.0
"""How long penstockd may take for that, s. It may be starting again."""

DIRECTIVE = "#PENSTOCK"

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which Slurm, or `#SBATCH --signal`, asks the job to save."""

OURS = frozenset(
    (
        *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        *(
            "HOME",
            "LOGNAME",
            "USER",
            "SHELL",
            "SHLVL",
            "HOSTNAME",
            "PWD",
            "OLDPWD",
            "TMPDIR",
            "PATH",
            "LD_LIBRARY_PATH",
            "_",
        ),
        *("SLURM_CONF", "SLURMD_NODENAME", "SLURM_WORKING_CLUSTER", "PENSTOCK_SPOOL"),
    )
)
"""Variables that describe this machine and would be wrong on another."""

THERE = {"PENSTOCK_DETACHED": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost"}
"""Variables that are others there. On several nodes, each instance adds its own (data/detached.sh)."""


class Trouble(Exception):
    """The job cannot run in the cloud. The message has the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Directives:
    """Input and output paths in the job's working directory, and the image of its container; empty: it has none."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    container: str = ""


def directives(script: str) -> Directives:
    """What a script's lines `#PENSTOCK input|output PATH ...` and `#PENSTOCK container IMAGE` say. Raises Trouble."""
    found: dict[str, list[str]] = {"input": [], "output": [], "container": []}
    for number, line in enumerate(script.splitlines(), 1):
        if not line.startswith(DIRECTIVE):
            continue
        try:
            kind, *paths = shlex.split(line.removeprefix(DIRECTIVE))
            if kind not in found or not paths:
                raise ValueError
        except ValueError:
            raise Trouble(
                f"line {number} of the script: {line}: give {DIRECTIVE} input PATH, {DIRECTIVE} output PATH or "
                f"{DIRECTIVE} container IMAGE"
            ) from None
        if kind == "container" and len(found[kind]) + len(paths) > 1:
            raise Trouble(f"line {number} of the script: {line}: a job runs in one container; name one image")
        for path in paths if kind != "container" else ():
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise Trouble(f"line {number} of the script: {path}: name a path inside the job's working directory")
        found[kind] += paths
    return Directives(tuple(found["input"]), tuple(found["output"]), "".join(found["container"]))


def environment(mine: Mapping[str, str]) -> str:
    """The environment, as a shell script that sets it on the instance. Slurm's own variables have the array's index."""
    kept = {name: value for name, value in mine.items() if name not in OURS and name.isidentifier()}
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted((kept | THERE).items()))


def job_id(mine: Mapping[str, str]) -> str:
    """The job's id in Penstock: `12`, or `12_3` in an array."""
    if "SLURM_ARRAY_TASK_ID" in mine:
        return f"{mine['SLURM_ARRAY_JOB_ID']}_{mine['SLURM_ARRAY_TASK_ID']}"
    return mine["SLURM_JOB_ID"]


def pack(file: Path, script: Path, mine: Mapping[str, str], directory: Path) -> None:
    """The archive for the instance. Raises Trouble."""
    wanted = directives(script.read_text(encoding="utf-8", errors="replace"))
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        notes = Path(folder)
        (notes / "directory").write_text(str(directory))
        (notes / "container").write_text(wanted.container)
        (notes / "environment").write_text(environment(mine))
        (notes / "outputs").write_text("".join(f"{path}\0" for path in wanted.outputs))
        (notes / "work").mkdir()
        with tarfile.open(file, "w:gz", compresslevel=1) as archive:
            archive.add(script, "script")
            for each in sorted(notes.iterdir()):
                archive.add(each, each.name)
            for path in wanted.inputs:
                if not (directory / path).exists():
                    raise Trouble(f"{DIRECTIVE} input {path}: it is not in {directory}")
                archive.add((directory / path).resolve(), f"work/{path}")
            for path in wanted.outputs:  # output of an earlier run, such as a checkpoint
                if path not in wanted.inputs and (directory / path).exists():
                    archive.add((directory / path).resolve(), f"work/{path}")


def unpack(content: IO[bytes], directory: Path, outputs: Sequence[str]) -> None:
    """Unpack an archive's declared output files; see `unpacking`. Raises Trouble, OSError.

    What would change anything else is left out, and the message names the first of it.
    """
    unpacking = Unpacking(directory, outputs)
    try:
        unpacking.unpack(content)
    except DamagedArchive as error:
        raise Trouble(f"the job's output files cannot be unpacked: {error}") from error
    if unpacking.amiss:
        raise Trouble(f"{unpacking.amiss} of the job's output files cannot be put in their places: {unpacking.first}")


def put(link: str, content: IO[bytes], size: int) -> None:
    """Upload an object, with retries for some minutes. Raises OSError, HTTPException."""
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    for left in range(TRIES - 1, -1, -1):
        content.seek(0)
        try:
            request = urllib.request.Request(link, content, headers, method="PUT")  # noqa: S310
            with urllib.request.urlopen(request, timeout=ANSWER_S):  # noqa: S310
                return
        except (OSError, HTTPException):
            if not left:
                raise
            time.sleep(LOOK_S * 2 ** (TRIES - 1 - left))


def say_to(link: str, text: str) -> None:
    """Write an object through its link. Raises OSError, HTTPException."""
    with tempfile.TemporaryFile() as content:
        content.write(text.encode())
        put(link, content, len(text.encode()))


def get(link: str, into: IO[bytes]) -> bool:
    """Download an object. False if it does not exist, S3 does not answer, or the download breaks off."""
    into.seek(0)
    into.truncate()
    try:
        with urllib.request.urlopen(link, timeout=ANSWER_S) as answer:  # noqa: S310
            shutil.copyfileobj(answer, into)
            size = answer.headers["Content-Length"]
            if size is not None and into.tell() != int(size):  # http.client does not tell an early end from the end
                return False
    except (OSError, HTTPException):  # urllib's own are OSErrors
        return False
    into.seek(0)
    return True


def surely_get(link: str, into: IO[bytes]) -> None:
    """Download an object that exists, with retries for some minutes. Raises Trouble."""
    for tries in range(TRIES):
        if get(link, into):
            return
        time.sleep(LOOK_S * 2**tries)
    raise Trouble("the job's output files cannot be fetched from S3")


class CloudRunner:
    """One job. `links` are its signed links. `printed` counts the bytes of its output that are printed already."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._links: Mapping[str, str] = {}
        self._outputs: tuple[str, ...] = ()
        self._printed = 0
        self._asked_to_stop = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Slurm asks the job to end: pass the request on, and fetch the output files."""
        self._asked_to_stop = True

    def wait_for_stop(self, most_s: float) -> None:
        """Wait until Slurm asks the job to end, this long at most."""
        until_s = time.monotonic() + most_s
        while not self._asked_to_stop and time.monotonic() < until_s:
            time.sleep(min(LOOK_S, most_s))

    def carry(self, links: Mapping[str, str], script: Path, mine: Mapping[str, str], directory: Path) -> int:
        """Upload the job, wait for it, and download its files. Returns the exit status. Raises Trouble, OSError,
        HTTPException."""
        self._links = links
        self._outputs = directives(script.read_text(encoding="utf-8", errors="replace")).outputs
        with tempfile.NamedTemporaryFile(prefix="penstock-") as file:
            pack(Path(file.name), script, mine, directory)
            put(self._links["put_input"], file.file, Path(file.name).stat().st_size)
        if modules := mine.get("LOADEDMODULES"):
            self._say(f"modules are not loaded in the cloud; the image must contain what the job needs of {modules}")
        told = False
        while True:
            for what in ("result", "stopped"):
                with tempfile.TemporaryFile() as content:
                    if get(self._links[f"get_{what}"], content):
                        code, *lost = [int(word) for word in content.read().split() or [b"1"]]
                        return self._bring(what, code, lost, directory)
            self._print_tail()
            if self._asked_to_stop and not told:
                say_to(self._links["put_stop"], "stop\n")
                told = True
            time.sleep(LOOK_S)

    def _print_tail(self) -> None:
        with tempfile.TemporaryFile() as content:
            if get(self._links["get_tail"], content):
                begin = int(content.readline())
                if begin > self._printed:
                    self._say(f"{begin - self._printed} bytes of output are omitted here")
                    self._printed = begin
                content.seek(self._printed - begin, os.SEEK_CUR)
                self._print(content)

    def _bring(self, what: str, code: int, lost: Sequence[int], directory: Path) -> int:
        """Fetch all output. `lost`: the numbers of nodes that have not sent theirs."""
        with tempfile.TemporaryFile() as content:
            surely_get(self._links["get_log"], content)
            content.seek(self._printed)
            self._print(content)
        others = [number for number in range(1, len(self._links)) if f"get_output{number}" in self._links]
        amiss: list[str] = []
        # The first node's comes last: if several nodes have changed a file, it is the one that counts.
        for name in (*(f"output{number}" for number in reversed(others) if number not in lost), "output"):
            with tempfile.TemporaryFile() as content:
                surely_get(self._links[f"get_{name}"], content)
                try:
                    unpack(content, directory, self._outputs)
                except Trouble as trouble:
                    amiss.append(str(trouble))
        if amiss:
            raise Trouble("; ".join(amiss))
        say_to(self._links["put_fetched"], "fetched\n")
        if what == "stopped" and not self._asked_to_stop:
            self._say("the run was ended in the cloud; the job is queued again")
            while not self._asked_to_stop:
                time.sleep(LOOK_S)
        return code

    def _print(self, content: IO[bytes]) -> None:
        while block := content.read(1 << 16):
            self._out.write(block)
            self._printed += len(block)
        self._out.flush()

    def _say(self, text: str) -> None:
        self._out.write(f"penstock: {text}\n".encode())
        self._out.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """`penstock-cloud-runner SHARE SCRIPT`, as cloud_runner.so calls it. Exit status: the script's; 1 if it could not run."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if len(arguments) != 2:
            raise Trouble("usage: penstock-cloud-runner SHARE SCRIPT, as cloud_runner.so calls it")
        cloud_runner = CloudRunner(sys.stdout.buffer)
        for each in STOPS:
            signal.signal(each, cloud_runner.on_signal)
        file = Path(arguments[0]) / "detached" / f"{job_id(os.environ)}.json"
        try:
            links = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            control = Path(os.environ.get("PENSTOCK_SPOOL", ""), job_id(os.environ), "control.json")
            if not control.exists():
                raise Trouble(UNASKED) from None
            print(f"penstock: {ENDED}", file=sys.stderr, flush=True)  # noqa: T201
            cloud_runner.wait_for_stop(QUEUED_S)
            raise Trouble(LEFT) from None
        return cloud_runner.carry(links, Path(arguments[1]), os.environ, Path.cwd())
    except (Trouble, OSError, HTTPException, ValueError, KeyError, tarfile.TarError) as error:
        print(f"penstock: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
