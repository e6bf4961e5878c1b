"""What sharing does on a real GPU: suspending by the driver's checkpoints, MPS, and what NVML says. As root, without Slurm.

    python -m benchmarks.gpu.sharing [--dry] [CHECK...]

Needs one NVIDIA GPU, torch, nvidia-ml-py, numpy and pydantic; the project need not be installed. Each check runs in a process
of its own with a time limit, so one that fails or hangs fails alone. Each figure is one line of JSON; the last line of a check
says how it ended. `--dry` computes on the processor and asks neither driver nor NVML: it shows that the script itself works.

| check | what it shows |
| --- | --- |
| `nvml` | what NVML says of each process, and whether its pids are the pids that we see |
| `slices` | the agent itself suspends and resumes two programs of 2 GB that know nothing of it, in time slices |
| `guarantee` | a guaranteed trainer's speed beside an honest and beside a silent opportunistic one, against that alone |
| `mps` | a client's throughput with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, against that alone |
| `large` | as `slices`, with programs that do not fit on the GPU together (not run unless named, as the following) |
| `driver` | the driver's checkpoints: who may ask for them, how long 2 GB take, the states after each call |
| `rough` | the same for processes that are stopped, helpers that are killed, and a GPU without room |
| `kinds` | processes that end while checkpointed, or have pinned, managed or shared memory |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.sharing_bench import (
    MULTIPLIES,
    TRAINS,
    Bench,
    Gpu,
    Node,
    Program,
    Skip,
    gpu_of,
    text_of,
)
from benchmarks.gpu.sharing_driver import check_driver, check_kinds, check_rough


def check_nvml(bench: Bench) -> None:
    """What NVML says of processes of two users, one of which forks."""
    if bench.dry:
        program = bench.counts()
        program.until(lambda said: said.get("steps", 0) > 5, 30)
        bench.say("dry", **program.finish())
    gpu = gpu_of(bench)
    api = gpu.api
    bench.say(
        "gpu",
        name=api.nvmlDeviceGetName(gpu.handle),
        driver=api.nvmlSystemGetDriverVersion(),
        kernel=os.uname().release,
        persistence=api.nvmlDeviceGetPersistenceMode(gpu.handle),
        compute_mode=api.nvmlDeviceGetComputeMode(gpu.handle),
        used_mb=gpu.used_mb(),
        yama=text_of("/proc/sys/kernel/yama/ptrace_scope"),
        mps=shutil.which("nvidia-cuda-mps-control"),
        tool=shutil.which("cuda-checkpoint"),
        devices=sorted(map(str, Path("/dev").glob("nvidia*"))),
        persistenced=text_of("/run/nvidia-persistenced/nvidia-persistenced.pid"),
    )
    ours, other = bench.counts("forks", 2.0), bench.counts("plain", 1.0, uid=bench.other_user)
    for program in (ours, other):
        program.until(lambda said: said.get("steps", 0) > 20, 40)
    for _ in range(3):
        time.sleep(1.2)
        bench.say("now", pids=gpu.processes(), used_mb=gpu.used_mb(), utilisation=gpu.utilisation())
    bench.say("pids", ours=ours.pid, other=other.pid, same={ours.pid, other.pid} <= set(gpu.processes()))
    children = text_of(f"/proc/{ours.pid}/task/{ours.pid}/children").split()
    bench.say("files", ours=ours.nvidia(), other=other.nvidia())
    for child in map(int, children):
        bench.say("forked", asked=bench.ask(child, "state"))
    bench.say("stranger", asked=bench.ask(1, "state"), of_us=bench.ask(os.getpid(), "state"))
    bench.say("ended", ours=ours.finish(), other=other.finish())
    for child in map(int, children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def check_slices(bench: Bench) -> None:
    """Two programs of 2 GB, of root and of another user, in time slices of 4 s until each was moved away and back twice."""
    slices(bench, 2.0, 2, 90.0)


def check_large(bench: Bench) -> None:
    """Two programs that take 55 % of the GPU each."""
    gib = 2.0 if bench.dry else 0.55 * gpu_of(bench).api.nvmlDeviceGetMemoryInfo(gpu_of(bench).handle).total / 2**30
    slices(bench, gib, 1, 200.0)


def slices(bench: Bench, gib: float, times: int, limit_s: float) -> None:
    gpu = None if bench.dry else gpu_of(bench)
    empty_mb = gpu.used_mb() if gpu is not None else 0
    users = {1: os.getuid(), 2: bench.other_user}
    node = bench.node(start_wait_s=0.5, sample_s=1.0, suspend_wait_s=60.0)
    for number in (1, 2):  # the second begins when it has its first slice, as the SPANK plugin has it
        node.order([(each,) for each in range(1, number + 1)], 4.0, users)
        if number == 1:
            node.start()
        node.until((node.run_dir / str(number) / "devices").exists, 60)
        began_s = time.monotonic()
        program = bench.counts(gib=gib, uid=users[number], **node.environment(number))
        node.job(number, program)
        program.until(lambda said: said.get("steps", 0) > 2, 60)
        bench.say(
            "started", job=number, s=time.monotonic() - began_s, used_mb=gpu.used_mb() - empty_mb if gpu else None
        )
    watch(bench, node, gpu, times, limit_s, empty_mb)
    for number, program in node.jobs.items():
        node.until(lambda number=number: node.states().get(str(number)) == "running", 60)
        node.order([(1,), (2,)], 1000.0, users)  # time for it to end
        bench.say("result", job=number, goes_on=program.goes_on(20), **program.finish())
    bench.say("agent", whys=node.whys(), asked=text_of(node.folder / "asked").splitlines(), log=warnings(node))


def watch(bench: Bench, node: Node, gpu: Gpu | None, times: int, limit_s: float, empty_mb: int) -> None:
    """Until both jobs were moved away and back so often: what NVML says of the GPU."""
    pids = {program.pid for program in node.jobs.values()}
    at_once, used_mb, ends = 0, list[int](), 0

    def done() -> bool:
        nonlocal at_once
        if gpu is not None:
            there = len(pids & set(gpu.processes()))
            at_once, _ = max(at_once, there), used_mb.append(gpu.used_mb() - empty_mb)
            return min(len(node.moves("suspend")), len(node.moves("resume"))) >= 2 * times
        return text_of(node.folder / "asked").count("resume") >= 2 * times

    with contextlib.suppress(RuntimeError):
        node.until(done, limit_s)
        ends = 1
    away, back = node.moves("suspend"), node.moves("resume")
    bench.say("moves", done=bool(ends), suspend_s=away, resume_s=back, whys=node.whys(), log=warnings(node))
    good = bool(away and back) and max(away + back) < 1.0
    bench.say(
        "memory", at_once=at_once, least_mb=min(used_mb, default=None), most_mb=max(used_mb, default=None), good=good
    )


def warnings(node: Node) -> str:
    return "\n".join(line[:400] for line in text_of(node.log).splitlines() if "level=info" not in line)[-1500:]


def check_guarantee(bench: Bench) -> None:
    """Steps per second of the guaranteed trainer alone, and in six windows of 15 s beside each kind of other."""
    gpu = None if bench.dry else gpu_of(bench)
    users = dict.fromkeys((1, 2, 3), os.getuid())
    node = bench.node(start_wait_s=5.0, sample_s=1.0)
    node.order([(1,)], 2.0, users)
    node.start()

    def begin(number: int, behaviour: str, products: int) -> Program:
        node.until((node.run_dir / str(number) / "devices").exists, 60)
        arguments = node.run_dir, number, bench.device, behaviour, "REPORT", products
        program = bench.start(TRAINS, *arguments, **node.environment(number))
        node.job(number, program)
        program.until(lambda said: "steps" in said, 60)
        return program

    def speed(program: Program, seconds: float) -> float:
        before = program.said()
        time.sleep(seconds)
        after = program.said()
        return (after["steps"] - before["steps"]) / (after["at_s"] - before["at_s"])

    short = 0.2 if bench.dry else 1.0
    first = begin(1, "honest", 100)  # some 20 ms
    time.sleep(5.0 * short)
    alone = speed(first, 12.0 * short)
    bench.say("alone", steps_per_s=alone)
    for number, behaviour in ((2, "honest"), (3, "silent")):
        node.order([(1, number)], 2.0, users)
        other = begin(number, behaviour, 200)
        taken = gpu.share_of({1: first.pid, 2: other.pid}) if gpu is not None else None
        windows, shares = list[float](), list[object]()
        for _ in range(6):
            windows.append(speed(first, 15.0 * short) / alone)
            shares.append((node.status().get("groups") or [{}])[0].get("share"))
        settled = sum(windows[2:]) / 4  # the 60 s after the first 30
        bench.say(
            behaviour,
            of_alone=windows,
            settled=settled,
            good=settled >= 0.95,
            steps_of_other=other.said().get("steps"),
            share=shares,
            gpu_time=taken() if taken is not None else None,
            whys=node.whys(),
        )
        other.process.kill()
        other.process.wait()
    bench.say("agent", log=warnings(node), contained=[each["text"] for each in node.status().get("contained", ())])


@contextlib.contextmanager
def mps(bench: Bench) -> Iterator[dict[str, str]]:
    """MPS's control daemon in a folder of its own; the environment of its clients."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise Skip("no nvidia-cuda-mps-control")
    folder = bench.folder / "mps"
    folder.mkdir()
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run(
        [control, "-d"], env=os.environ | environment, capture_output=True, text=True, timeout=10, check=False
    )
    try:
        bench.say("daemon", code=started.returncode, said=(started.stdout + started.stderr)[-300:])
        yield environment
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [control], input="quit -t 1\n", env=os.environ | environment, text=True, timeout=10, check=False
            )
        for name in ("control.log", "server.log"):
            bench.say(name, log=text_of(folder / name)[-500:])


def speeds(bench: Bench, environments: Sequence[dict[str, str]], seconds: float = 3.0) -> list[float]:
    """Products per second of programs that run at the same time."""
    size = 4096 if not bench.dry else 128
    programs = [bench.start(MULTIPLIES, "REPORT", bench.device, size, **each) for each in environments]
    for program in programs:
        program.until(lambda said: "speed" in said, 40)
    time.sleep(1.0)
    found: list[list[float]] = [[] for _ in programs]
    end_s, seen = time.monotonic() + seconds, [0.0 for _ in programs]
    while time.monotonic() < end_s:
        for index, program in enumerate(programs):
            said = program.said()
            if said.get("at_s", 0.0) != seen[index]:
                seen[index] = said["at_s"]
                found[index].append(said["speed"])
        time.sleep(0.05)
    for program in programs:
        program.process.terminate()
    for program in programs:
        program.process.wait(10)
    return [sum(each) / max(len(each), 1) for each in found]


def check_mps(bench: Bench) -> None:
    """A limited client beside a client that has the rest."""
    share = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    if bench.dry:
        bench.say("dry", speeds=speeds(bench, [{}, {}], 1.0))
    gpu_of(bench)
    bench.say("without MPS", alone=speeds(bench, [{}])[0], two=speeds(bench, [{}, {}]))
    with mps(bench) as environment:
        (alone,) = speeds(bench, [environment])
        bench.say("alone", speed=alone)
        for percent in (20, 50, 80):
            mine, theirs = environment | {share: str(percent)}, environment | {share: str(100 - percent)}
            limited, rest = speeds(bench, [mine, theirs])
            off = 100 * limited / alone - percent
            bench.say(
                "share",
                percent=percent,
                of_alone=limited / alone,
                off_points=off,
                rest=rest / alone,
                good=abs(off) <= 5,
            )


CHECKS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "nvml": (check_nvml, 60.0),
    "slices": (check_slices, 120.0),
    "guarantee": (check_guarantee, 280.0),
    "mps": (check_mps, 90.0),
    "large": (check_large, 300.0),
    "driver": (check_driver, 90.0),
    "rough": (check_rough, 150.0),
    "kinds": (check_kinds, 90.0),
}
"""Each with its time limit, s."""

USUAL = ("nvml", "slices", "guarantee", "mps")
"""What runs if nothing is named: some four minutes."""


def one(name: str, dry: bool) -> None:
    """Run one check in this process."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-", ignore_cleanup_errors=True) as folder:
        bench = Bench(name, Path(folder), dry)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("the check took too long"))
        try:
            CHECKS[name][0](bench)
            end = "done"
        except Skip as error:
            end = f"skip: {error}"
        except Exception as error:
            end = f"failed: {type(error).__name__}: {error}"
        finally:
            bench.close()
        bench.say("end", how=end, s=round(time.monotonic() - began_s, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; the first four if none is named"
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.checks) - set(CHECKS)
    if unknown:
        parser.error(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if options.one:
        one(options.checks[0], options.dry)
        return
    for name in options.checks or USUAL:
        command = [sys.executable, "-m", "benchmarks.gpu.sharing", "--one", name, *(["--dry"] if options.dry else [])]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            process.wait(CHECKS[name][1])
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            print(json.dumps({"check": name, "figure": "end", "how": f"failed: over {CHECKS[name][1]} s"}), flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
