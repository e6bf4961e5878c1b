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
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NODE = "bench"
NOBODY = 65534
PTRACE, UNIT = 19, (0, 1, 2, 3, 19)
"""CAP_SYS_PTRACE, and the capabilities of the agent's unit."""
DEBUG = (101, 298, 310, 311, 312, 438)
"""System calls of x86-64 that @system-service of the agent's unit leaves out: ptrace, process_vm_readv, pidfd_getfd and such."""
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38

COUNTS = """
# Fills the GPU with numbers, and goes on computing with them in a way whose result is known for any number of steps.
import json, os, signal, sys, time
import torch
kind, gib, path = sys.argv[1], float(sys.argv[2]), sys.argv[3]
device, ended = sys.argv[4], []
signal.signal(signal.SIGUSR1, lambda *_: ended.append(1))
size = int(gib * 2**27)
if kind == "managed":  # a little memory of cuMemAllocManaged, which the processor and the GPU share
    import ctypes
    torch.zeros(1, device=device)
    pointer = ctypes.c_uint64()
    managed = ctypes.CDLL("libcuda.so.1").cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(2**24), 1)
    ctypes.memset(pointer.value, 1, 2**24)
if kind == "pinned":
    pinned = torch.zeros(2**26, dtype=torch.uint8).pin_memory()
numbers = torch.arange(size, dtype=torch.int64, device=device)
if kind == "shared":  # another process has a handle of our memory
    import torch.multiprocessing as processes
    context = processes.get_context("fork")
    from torch.multiprocessing.reductions import reduce_tensor
    handle = reduce_tensor(numbers)
if kind == "forks":  # as the worker of a data loader
    if os.fork() == 0:
        time.sleep(600)
A, C, ALL = 6364136223846793005, 1442695040888963407, 2**64
signed = lambda number: number - ALL if number >= ALL // 2 else number
steps, a, c, said_s, longest_s, before_s = 0, 1, 0, 0.0, 0.0, time.monotonic()
def say(**more):
    with open(path + ".new", "w") as file:
        json.dump({"pid": os.getpid(), "steps": steps, "longest_s": longest_s, **more}, file)
    os.replace(path + ".new", path)
while not ended:
    numbers.mul_(signed(A)).add_(signed(C))
    if device != "cpu":
        torch.cuda.synchronize()
    steps, a, c = steps + 1, a * A % ALL, (c * A + C) % ALL
    now_s = time.monotonic()
    longest_s, before_s = max(longest_s, now_s - before_s) if steps > 5 else 0.0, now_s
    if now_s - said_s > 0.05:
        said_s = now_s
        say()
result = int(numbers.sum()) % ALL
say(right=result == (a * (size * (size - 1) // 2) + c * size) % ALL)
"""

MULTIPLIES = """
# Says how many products of matrices it makes in a second, again and again.
import json, os, sys, time
import torch
path, device, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
kind = torch.bfloat16 if device != "cpu" else torch.float32
one = torch.randn(size, size, dtype=kind, device=device)
other, made, since_s = one.clone(), 0, time.monotonic()
while True:
    for _ in range(10):
        torch.matmul(one, other)
    if device != "cpu":
        torch.cuda.synchronize()
    made, now_s = made + 10, time.monotonic()
    if now_s - since_s > 0.5:
        with open(path + ".new", "w") as file:
            json.dump({"pid": os.getpid(), "speed": made / (now_s - since_s), "at_s": now_s}, file)
        os.replace(path + ".new", path)
        made, since_s = 0, now_s
"""

TRAINS = """
# A trainer that reports its steps to the agent of its node. `silent`: it trains on without reporting anything.
import json, os, sys, time
from pathlib import Path
import torch
run_dir, number, device, behaviour, path, products = Path(sys.argv[1]), *sys.argv[2:5], sys.argv[5], int(sys.argv[6])
channel = None
if behaviour != "silent":
    from penstock_executor.node_channel import Channel
    channel = Channel(run_dir, int(number), anywhere=False)
size = 4096 if device != "cpu" else 256
kind = torch.bfloat16 if device != "cpu" else torch.float32
one = torch.randn(size, size, dtype=kind, device=device)
steps, said_s = 0, 0.0
while True:
    for _ in range(products):
        torch.matmul(one, one)
    if device != "cpu":
        torch.cuda.synchronize()
    steps += 1
    if channel is not None:
        channel.step_done(8)
        if channel.request is not None:  # it cannot move off its GPU
            request = channel.request
            channel.suspended(request)
            while channel.wants(request):
                time.sleep(0.02)
            channel.resumed()
    if time.monotonic() - said_s > 0.05:
        said_s = time.monotonic()
        with open(path + ".new", "w") as file:
            json.dump({"pid": os.getpid(), "steps": steps, "at_s": said_s}, file)
        os.replace(path + ".new", path)
"""

SCONTROL = """#!/bin/sh
pid=$(cat {folder}/$2.pid 2>/dev/null)
echo "$1 $2" >> {folder}/asked
case "$1" in
suspend) kill -TSTP $pid; (sleep 2; kill -STOP $pid) >/dev/null 2>&1 & ;;
resume) kill -CONT $pid ;;
show) echo "SLURM_CONF = {folder}/slurm.conf" ;;
esac
"""

ASKS = """
# Asks the driver: each argument is a verb, or a number of seconds to wait. Says what it answered, one line each.
import ctypes, json, sys, time
pid, cuda, state = int(sys.argv[1]), None, ctypes.c_int(-1)
def say(verb, code, began_s):
    print(json.dumps({"verb": verb, "code": code, "s": round(time.monotonic() - began_s, 4), "state": state.value}), flush=True)
class Lock(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("zero", ctypes.c_uint), ("zeros", ctypes.c_uint64 * 7)]
for verb in sys.argv[2:]:
    began_s = time.monotonic()
    if verb[0].isdigit():
        time.sleep(float(verb))
        continue
    if cuda is None:
        cuda = ctypes.CDLL("libcuda.so.1")
    state.value = -1
    if verb == "init":
        say(verb, cuda.cuInit(0), began_s)
        continue
    if verb == "lock":
        code = cuda.cuCheckpointProcessLock(pid, ctypes.byref(Lock(timeout_ms=3000)))
    elif verb != "state":
        code = getattr(cuda, "cuCheckpointProcess" + verb.capitalize())(pid, ctypes.byref((ctypes.c_uint64 * 8)()))
    else:
        code = 0
    asked_s = time.monotonic()
    asked = cuda.cuCheckpointProcessGetState(pid, ctypes.byref(state))
    print(json.dumps({"verb": verb, "code": code, "s": round(asked_s - began_s, 4), "state": state.value,
                      "state_code": asked, "state_s": round(time.monotonic() - asked_s, 4)}), flush=True)
"""


class Skip(Exception):
    """The check cannot run here; the message says why."""


class Bench:
    """The processes of one check, which end with it."""

    def __init__(self, check: str, folder: Path, dry: bool) -> None:
        self.check, self.folder, self.dry = check, folder, dry
        self.device = "cpu" if dry else "cuda"
        self._processes: list[subprocess.Popen[Any]] = []
        self._numbers = itertools.count()
        self.other_user = os.getuid()
        if self.other_user == 0:
            with contextlib.suppress(OSError):  # it may not enter the folder of our Python
                subprocess.run([sys.executable, "-c", ""], cwd="/", check=True, **as_user(NOBODY))
                self.other_user = NOBODY
        folder.chmod(0o777)

    def say(self, figure: str, **fields: object) -> None:
        print(json.dumps({"check": self.check, "figure": figure} | fields), flush=True)

    def start(self, program: str, *arguments: object, uid: int = 0, **environment: str) -> Program:
        """Start a program in Python that reports in a file."""
        number = next(self._numbers)
        report, log = self.folder / f"report-{number}", self.folder / f"log-{number}"
        where = {"HOME": str(self.folder), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *(str(each).replace("REPORT", str(report)) for each in arguments)],
                env=os.environ | where | environment,
                cwd="/",
                stdout=file,
                stderr=file,
                **as_user(uid),
            )
        self._processes.append(process)
        return Program(process, report, log)

    def counts(self, kind: str = "plain", gib: float = 2.0, uid: int = 0, **environment: str) -> Program:
        gib = gib if not self.dry else 0.01
        return self.start(COUNTS, kind, gib, "REPORT", self.device, uid=uid, **environment)

    def node(self, **settings: object) -> Node:
        return Node(self, settings)

    def ask(
        self, pid: int, *verbs: object, uid: int = 0, limits: str = "", limit_s: float = 10.0
    ) -> list[dict[str, Any]]:
        """What the driver answers a helper process. A helper that takes too long is killed.

        `limits`: `no-ptrace`: without that capability; `unit`: as in the agent's unit.
        """
        if self.dry:
            return [{"verb": str(verb), "code": 0, "s": 0.0, "state": 0} for verb in verbs]

        helper = subprocess.Popen(
            [sys.executable, "-c", ASKS, str(pid), *map(str, verbs)],
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn={"no-ptrace": without_ptrace, "unit": as_in_the_unit}.get(limits),
            **as_user(uid),
        )
        try:
            out, errors = helper.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            helper.kill()
            out, errors = helper.communicate()
            errors += f"killed after {limit_s} s"
        answers: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        if helper.returncode != 0:
            answers.append({"helper": helper.returncode, "said": errors[-300:]})
        return answers

    def also(self, process: subprocess.Popen[Any]) -> None:
        """Have a process end with the check, before the others."""
        self._processes.insert(0, process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def without_ptrace() -> None:
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, PTRACE, 0, 0, 0)


def as_in_the_unit() -> None:
    """Few capabilities, and death by a system call for debuggers, as systemd does it."""
    libc = ctypes.CDLL(None)
    for capability in set(range(41)) - set(UNIT):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    # Load the number; for each forbidden one, go to the end, which kills; else allow.
    rules = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    rules += [struct.pack("HBBI", 0x15, len(DEBUG) - index, 0, number) for index, number in enumerate(DEBUG)]
    rules += [struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000), struct.pack("HBBI", 0x06, 0, 0, 0x80000000)]
    code = ctypes.create_string_buffer(b"".join(rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0):
        raise OSError("no seccomp")


def as_user(uid: int) -> dict[str, Any]:
    return {"user": uid, "group": uid, "extra_groups": []} if uid and os.getuid() == 0 else {}


class Program:
    """A running program and what it reports."""

    def __init__(self, process: subprocess.Popen[Any], report: Path, log: Path) -> None:
        self.process, self.pid, self._report, self._log = process, process.pid, report, log

    def said(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self._report.read_text())
        return {}

    def until(self, what: Callable[[dict[str, Any]], Any], seconds: float) -> dict[str, Any]:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if what(self.said()):
                return self.said()
            if self.process.poll() is not None and not what(self.said()):
                break
            time.sleep(0.02)
        raise RuntimeError(f"{self.process.poll()=} {self.said()} {self._log.read_text()[-600:]}")

    def goes_on(self, seconds: float = 8.0) -> bool:
        """Whether the program makes more steps."""
        before = self.said().get("steps", 0)
        with contextlib.suppress(RuntimeError):
            self.until(lambda said: said.get("steps", 0) > before + 2, seconds)
            return True
        return False

    def finish(self) -> dict[str, Any]:
        """End a program that counts. `right` says whether its numbers are what they should be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.until(lambda said: "right" in said, 10)
            self.process.wait(10)
        ended = self.process.poll()
        self.process.kill()
        self.process.wait()
        log = self._log.read_text()[-300:] if "right" not in self.said() else ""
        return {"right": self.said().get("right"), "exit": ended, "longest_s": self.said().get("longest_s")} | (
            {"log": log} if log else {}
        )

    def memory_mb(self) -> dict[str, int]:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        names = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
        return {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.split(":")[0] in names}

    def nvidia(self) -> dict[str, object]:
        """What the kernel says of a process: its files of NVIDIA's driver, and whether it has the driver's library."""
        files = []
        for each in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                files.append(str(each.readlink()))
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return {
            "files": sorted({each for each in files if each.startswith("/dev/nvidia")}),
            "library": "libcuda.so" in maps,
            "mapped": sorted({line.split()[-1] for line in maps.splitlines() if "/dev/nvidia" in line}),
        }


class Node:
    """A spool, the agent of a node, which is a process of its own, and a stand-in for Slurm that sends Slurm's signals."""

    def __init__(self, bench: Bench, settings: dict[str, object]) -> None:
        self.bench, self.folder = bench, bench.folder
        self.spool, self.run_dir, self.log = (self.folder / each for each in ("spool", "run", "agent.log"))
        self.spool.mkdir()
        (self.folder / "bin").mkdir()
        for name in ("scontrol", "squeue", "scancel"):
            program = self.folder / "bin" / name
            program.write_text(SCONTROL.format(folder=self.folder))
            program.chmod(0o755)
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        file = self.folder / "penstock.toml"
        file.write_text(
            f'[slurm]\npartitions = ["a"]\nspool_dir = "{self.spool}"\n'
            f'[agent]\nrun_dir = "{self.run_dir}"\nstate_dir = "{self.folder}/state"\n{text}'
        )
        self.command = [sys.executable, "-m", "penstock_slurm.agent.main", "--config", str(file), "--node", NODE]
        self.jobs: dict[int, Program] = {}
        self._number = itertools.count(1)
        self.agent: subprocess.Popen[Any] | None = None

    def start(self, **more: str) -> None:
        environment = (
            os.environ
            | more
            | {
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("profiles", "scheduler", "slurm_plugin")),
            }
        )
        with self.log.open("a") as log:
            self.agent = subprocess.Popen(self.command, env=environment, stderr=log, cwd=ROOT)
        self.bench.also(self.agent)

    def job(self, number: int, program: Program) -> None:
        self.jobs[number] = program
        (self.folder / f"{number}.pid").write_text(str(program.pid))

    def environment(self, number: int) -> dict[str, str]:
        path = os.pathsep.join(str(ROOT / each) for each in ("profiles", "executor"))
        return {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": NODE, "PYTHONPATH": path}

    def order(self, packs: list[tuple[int, ...]], slice_s: float, users: dict[int, int]) -> None:
        """Packs on the one GPU. In a pack of two, the first is guaranteed."""
        together = [
            {"jobs": list(map(str, each))} | ({"guaranteed": str(each[0])} if len(each) > 1 else {}) for each in packs
        ]
        jobs = [
            {"job": str(each), "slurm_job": each, "uid": users[each], "gpus": 1, "running": True}
            for each in itertools.chain(*packs)
        ]
        shared = {"node": NODE, "gpus": 1, "packs": together, "slice_s": slice_s}
        order = {
            "node": NODE,
            "number": next(self._number),
            "written_s": time.time(),
            "groups": [{"shared": shared, "devices": [0]}],
            "jobs": jobs,
        }
        folder = self.spool / "agents" / NODE
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "order.new").write_text(json.dumps(order))
        (folder / "order.new").rename(folder / "order.json")

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            return json.loads((self.spool / "agents" / NODE / "status.json").read_text())
        return {}

    def states(self) -> dict[str, str]:
        return {each["job"]: each["state"] for each in self.status().get("jobs", ())}

    def whys(self) -> dict[str, str]:
        return {each["job"]: each["why"] for each in self.status().get("jobs", ()) if each["why"]}

    def moves(self, verb: str) -> list[float]:
        """Seconds of each move by the driver, as the agent saw it."""
        return [
            float(each)
            for each in re.findall(rf'event="GPU memory moved".* verb={verb} seconds=(\S+)', _text(self.log))
        ]

    def until(self, what: Callable[[], object], seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end_s or (self.agent is not None and self.agent.poll() is not None):
                raise RuntimeError(f"{self.states()} {self.whys()} {_text(self.log)[-900:]}")
            time.sleep(0.05)


class Gpu:
    """NVML's first GPU."""

    def __init__(self) -> None:
        import pynvml

        self.api = pynvml
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used_mb(self) -> int:
        return self.api.nvmlDeviceGetMemoryInfo(self.handle).used // 2**20

    def processes(self) -> dict[int, int | None]:
        found = self.api.nvmlDeviceGetComputeRunningProcesses_v3(self.handle)
        return {each.pid: each.usedGpuMemory and each.usedGpuMemory // 2**20 for each in found}

    def share_of(self, pids: dict[int, int]) -> Callable[[], dict[int, float]]:
        """Begins to count the GPU time of processes; what it returns ends that, and says which share each had."""
        from penstock_profiles.nvml import Nvml

        nvml, end, began_s = Nvml(), threading.Event(), time.monotonic()

        def count() -> None:
            while not end.wait(0.2):
                nvml.gpu_times()

        nvml.__enter__()
        nvml.gpu_times()
        thread = threading.Thread(target=count, daemon=True)
        thread.start()

        def stop() -> dict[int, float]:
            end.set()
            thread.join()
            times = nvml.gpu_times() or {}
            nvml.__exit__()
            seconds = time.monotonic() - began_s
            return {job: sum(s for (_, of), s in times.items() if of == pid) / seconds for job, pid in pids.items()}

        return stop

    def utilisation(self) -> list[tuple[int, int, int]]:
        try:
            found = self.api.nvmlDeviceGetProcessUtilization(self.handle, 0)
        except self.api.NVMLError as error:
            return [(0, 0, error.value)]
        return [(each.pid, each.smUtil, each.timeStamp // 1000 % 1_000_000) for each in found]


def gpu_of(bench: Bench) -> Gpu:
    if bench.dry:
        raise Skip("dry")
    try:
        return Gpu()
    except Exception as error:
        raise Skip(f"no GPU: {error}") from None


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
        yama=_text("/proc/sys/kernel/yama/ptrace_scope"),
        mps=shutil.which("nvidia-cuda-mps-control"),
        tool=shutil.which("cuda-checkpoint"),
        devices=sorted(map(str, Path("/dev").glob("nvidia*"))),
        persistenced=_text("/run/nvidia-persistenced/nvidia-persistenced.pid"),
    )
    ours, other = bench.counts("forks", 2.0), bench.counts("plain", 1.0, uid=bench.other_user)
    for program in (ours, other):
        program.until(lambda said: said.get("steps", 0) > 20, 40)
    for _ in range(3):
        time.sleep(1.2)
        bench.say("now", pids=gpu.processes(), used_mb=gpu.used_mb(), utilisation=gpu.utilisation())
    bench.say("pids", ours=ours.pid, other=other.pid, same={ours.pid, other.pid} <= set(gpu.processes()))
    children = _text(f"/proc/{ours.pid}/task/{ours.pid}/children").split()
    bench.say("files", ours=ours.nvidia(), other=other.nvidia())
    for child in map(int, children):
        bench.say("forked", asked=bench.ask(child, "state"))
    bench.say("stranger", asked=bench.ask(1, "state"), of_us=bench.ask(os.getpid(), "state"))
    bench.say("ended", ours=ours.finish(), other=other.finish())
    for child in map(int, children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def check_driver(bench: Bench) -> None:
    """Suspend and resume by each user who might ask."""
    gpu = gpu_of(bench)
    for whose in sorted({0, bench.other_user}):
        program = bench.counts(uid=whose)
        program.until(lambda said: said.get("steps", 0) > 20, 40)
        if whose == 0:
            bench.say("state without cuInit", asked=bench.ask(program.pid, "state", "init", "state"))
            bench.say("nobody of root's", asked=bench.ask(program.pid, "state", "lock", "unlock", uid=bench.other_user))
        else:
            bench.say(
                "root without CAP_SYS_PTRACE",
                asked=bench.ask(program.pid, "state", "lock", "unlock", limits="no-ptrace"),
            )
            asked = bench.ask(program.pid, "state", "lock", "checkpoint", "restore", "unlock", limits="unit")
            bench.say("root as in the agent's unit", asked=asked, goes_on=program.goes_on())
        for asker in (0, whose):
            before_mb, host = gpu.used_mb(), program.memory_mb()
            away = bench.ask(program.pid, "state", "lock", "checkpoint", "state", uid=asker)
            bench.say("suspend", of=whose, by=asker, asked=away)
            bench.say(
                "memory",
                before_mb=before_mb,
                after_mb=gpu.used_mb(),
                listed=program.pid in gpu.processes(),
                host_before=host,
                host_after=program.memory_mb(),
                files=program.nvidia(),
            )
            back = bench.ask(program.pid, "restore", "unlock", "state", uid=asker)
            bench.say("resume", of=whose, by=asker, asked=back, goes_on=program.goes_on(), used_mb=gpu.used_mb())
        bench.say(
            "wrong order", asked=bench.ask(program.pid, "checkpoint", "restore", "unlock", "lock", "lock", "unlock")
        )
        bench.say("result", of=whose, goes_on=program.goes_on(), **program.finish())


def check_rough(bench: Bench) -> None:
    """Processes that are stopped, helpers that are killed, and a GPU without room."""
    gpu = gpu_of(bench)
    program = bench.counts()
    program.until(lambda said: said.get("steps", 0) > 20, 40)
    pid = program.pid

    os.kill(pid, signal.SIGSTOP)
    bench.say("stopped: state", asked=bench.ask(pid, "state", limit_s=4))
    bench.say("stopped: lock", asked=bench.ask(pid, "lock", limit_s=6))
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    bench.say("stopped, goes on: state", asked=bench.ask(pid, "state", "unlock", limit_s=5), goes_on=program.goes_on())

    bench.say("stopped when locked", asked=bench.ask(pid, "lock"))
    os.kill(pid, signal.SIGSTOP)
    bench.say("stopped when locked: checkpoint", asked=bench.ask(pid, "checkpoint", limit_s=4))
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    bench.say("goes on: state", asked=bench.ask(pid, "state", "restore", "unlock"), goes_on=program.goes_on())

    bench.say("checkpointed", asked=bench.ask(pid, "lock", "checkpoint"))
    os.kill(pid, signal.SIGSTOP)
    bench.say("checkpointed and stopped: state", asked=bench.ask(pid, "state", limit_s=4))
    bench.say("checkpointed and stopped: restore", asked=bench.ask(pid, "restore", limit_s=4), used_mb=gpu.used_mb())
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    bench.say("goes on: state", asked=bench.ask(pid, "state", "restore", "unlock"), goes_on=program.goes_on())

    for limit_s in (0.25, 0.4):  # the helper needs about 0.1 s to begin
        bench.say("helper killed", after_s=limit_s, asked=bench.ask(pid, "lock", "checkpoint", limit_s=limit_s))
        bench.say("state", asked=bench.ask(pid, "state", "1", "state", "checkpoint", "restore", "unlock"))
        bench.say("state", asked=bench.ask(pid, "state"), goes_on=program.goes_on())

    free_mb = gpu.api.nvmlDeviceGetMemoryInfo(gpu.handle).free // 2**20
    bench.say("checkpointed", asked=bench.ask(pid, "lock", "checkpoint"))
    hog = bench.counts(gib=(free_mb + 1024) / 1024)
    hog.until(lambda said: said.get("steps", 0) > 2, 40)
    bench.say("restore without room", asked=bench.ask(pid, "restore", "unlock"), used_mb=gpu.used_mb())
    hog.process.kill()
    hog.process.wait()
    time.sleep(1.0)
    bench.say("restore with room again", asked=bench.ask(pid, "state", "restore", "unlock"), goes_on=program.goes_on())
    bench.say("result", **program.finish())


def check_kinds(bench: Bench) -> None:
    """Processes that end while they are checkpointed, and processes that the driver may be unable to checkpoint."""
    gpu = gpu_of(bench)
    for number, name in ((signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM")):
        program = bench.counts()
        program.until(lambda said: said.get("steps", 0) > 20, 40)
        asked = bench.ask(program.pid, "lock", "checkpoint")
        began_s = time.monotonic()
        program.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.process.wait(5)
        bench.say(name, asked=asked, exit=program.process.poll(), s=time.monotonic() - began_s, used_mb=gpu.used_mb())
        program.process.kill()

    for kind in ("pinned", "managed", "shared"):
        program = bench.counts(kind, 0.5)
        with contextlib.suppress(RuntimeError):
            program.until(lambda said: said.get("steps", 0) > 20, 40)
        asked = bench.ask(program.pid, "lock", "checkpoint", "restore", "unlock")
        bench.say(
            kind, asked=asked, alive=program.process.poll() is None, goes_on=program.goes_on(3), **program.finish()
        )


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
    bench.say("agent", whys=node.whys(), asked=_text(node.folder / "asked").splitlines(), log=warnings(node))


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
        return _text(node.folder / "asked").count("resume") >= 2 * times

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
    return "\n".join(line[:400] for line in _text(node.log).splitlines() if "level=info" not in line)[-1500:]


def check_guarantee(bench: Bench) -> None:
    """Steps per second of the guaranteed trainer alone, and in the last 25 s of 40 beside each kind of other."""
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
        time.sleep(15.0 * short)
        taken = gpu.share_of({1: first.pid, 2: other.pid}) if gpu is not None else None
        beside, others = speed(first, 25.0 * short), other.said().get("steps")
        shares = taken() if taken is not None else None
        of_alone = beside / alone
        group = (node.status().get("groups") or [{}])[0]
        bench.say(
            behaviour,
            of_alone=of_alone,
            good=of_alone >= 0.95,
            steps_of_other=others,
            share=group.get("share"),
            gpu_time=shares,
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
            bench.say(name, log=_text(folder / name)[-500:])


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


def _text(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


CHECKS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "nvml": (check_nvml, 60.0),
    "slices": (check_slices, 120.0),
    "guarantee": (check_guarantee, 150.0),
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
