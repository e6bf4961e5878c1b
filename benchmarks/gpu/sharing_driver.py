"""Raw checks of the driver's checkpoints of processes, without the agent: see `benchmarks.gpu.sharing`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from benchmarks.gpu.sharing_bench import Bench, gpu_of


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
