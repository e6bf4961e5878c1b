"""Programs, the agent of a node and NVML for the checks of sharing on a real GPU (`benchmarks.gpu.sharing`)."""

from __future__ import annotations

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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AGENT = """import json, sys
from penstock_slurm.agent.main import main
from penstock_slurm.agent.settings import AgentSettings
for name, value in json.loads(sys.argv.pop(1)).items():
    setattr(AgentSettings, name, value)
sys.exit(main())"""
"""The agent, with constants of the bench."""
NODE = f"bench{os.getpid()}"
"""Unlike that of any bench that runs at the same time: an agent finds its jobs' processes by it."""
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

    def node(self, **constants: float) -> Node:
        return Node(self, constants)

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


def python_path(*packages: str) -> str:
    """These folders of the project before those that are there already."""
    before = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return os.pathsep.join([*(str(ROOT / each) for each in packages), *before])


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

    def __init__(self, bench: Bench, constants: dict[str, float]) -> None:
        self.bench, self.folder = bench, bench.folder
        self.spool, self.run_dir, self.log = (self.folder / each for each in ("spool", "run", "agent.log"))
        self.spool.mkdir()
        (self.folder / "bin").mkdir()
        for name in ("scontrol", "squeue", "scancel"):
            program = self.folder / "bin" / name
            program.write_text(SCONTROL.format(folder=self.folder))
            program.chmod(0o755)
        file = self.folder / "penstock.toml"
        file.write_text(
            f'[slurm]\npartitions = ["a"]\nspool_dir = "{self.spool}"\n'
            f'[agent]\ncuda_checkpoint = "auto"\nrun_dir = "{self.run_dir}"\nstate_dir = "{self.folder}/state"\n'
        )
        self.command = [sys.executable, "-c", AGENT, json.dumps(constants), "--config", str(file), "--node", NODE]
        self.jobs: dict[int, Program] = {}
        self._number = itertools.count(1)
        self.agent: subprocess.Popen[Any] | None = None

    def start(self, **more: str) -> None:
        # The agent's helper runs as the job's user, who may not enter the folder of the project.
        readable = self.folder / "lib"
        shutil.copytree(ROOT / "profiles" / "penstock_profiles", readable / "penstock_profiles", dirs_exist_ok=True)
        environment = (
            os.environ
            | more
            | {
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "PYTHONPATH": f"{readable}:{python_path('profiles', 'scheduler', 'slurm_plugin')}",
            }
        )
        with self.log.open("a") as log:
            self.agent = subprocess.Popen(self.command, env=environment, stderr=log, cwd=ROOT)
        self.bench.also(self.agent)

    def job(self, number: int, program: Program) -> None:
        self.jobs[number] = program
        (self.folder / f"{number}.pid").write_text(str(program.pid))

    def environment(self, number: int) -> dict[str, str]:
        path = python_path("profiles", "executor")
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
            for each in re.findall(rf'event="GPU memory moved".* verb={verb} seconds=(\S+)', text_of(self.log))
        ]

    def until(self, what: Callable[[], object], seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end_s or (self.agent is not None and self.agent.poll() is not None):
                raise RuntimeError(f"{self.states()} {self.whys()} {text_of(self.log)[-900:]}")
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


def text_of(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
