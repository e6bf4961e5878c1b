"""`penstock observe` beside a real Slurm with accounting: what it says is what sacct says, and it runs no command that writes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.cli import main
from penstock_slurm.history.reading import read_used
from penstock_slurm.history.waits import BESIDE
from tests.slurm_plugin.history.conftest import ServeSamples

pytestmark = pytest.mark.slurm


def test_the_hours_are_saccts_and_slurm_is_only_read(
    make_loopback: MakeLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = make_loopback("t4:2x4,a100:1x4", accounting=True)

    def submit(*options: str, command: str = "sleep 3") -> str:
        return slurm.command("sbatch", "--parsable", "-o/dev/null", *options, "--wrap", command).stdout.strip()

    ended = [submit("-pt4", f"--gres=gpu:{gpus}") for gpus in (1, 2, 4, 4, 4)] + [submit("-pa100", "--gpus=2")]
    failed = submit("-pa100", "--gres=gpu:1", command="exit 3")
    submit("-pt4")  # no GPU
    running = submit("-pa100", "--gres=gpu:a100:1", command="sleep 600")

    def rows() -> dict[str, list[str]]:
        listing = slurm.command("sacct", "-aXDnP", "-o", "JobIDRaw,State,AllocTRES,ElapsedRaw").stdout
        return {row[0]: row for row in (line.split("|") for line in listing.splitlines())}

    def all_over() -> bool:
        found = rows()
        over = all(job in found and found[job][1] in ("COMPLETED", "FAILED") for job in (*ended, failed))
        return over and found.get(running, ["", ""])[1] == "RUNNING"

    wait_for(all_over, 180, "the jobs' ends in the accounts", details=lambda: str(rows()))
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    for name in ("sacct", "scontrol", "squeue", "scancel", "sbatch", "sacctmgr", "srun", "sshare"):
        wrapper = programs / name
        wrapper.write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\nexec {shutil.which(name)} "$@"\n')
        wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    page = tmp_path / "page.html"
    monkeypatch.setattr("sys.argv", ["penstock", "observe", "--json", "--what-if", "--html", str(page)])
    with pytest.raises(SystemExit, match="0"):  # as click ends a command that went well
        main()
    told = json.loads(capsys.readouterr().out)

    commands = [line.split() for line in log.read_text().splitlines()]
    assert {words[0] for words in commands} == {"sacct", "scontrol"}
    assert all("show" in words or "-V" in words for words in commands if words[0] == "scontrol"), commands
    ran = {row[0]: row for row in rows().values() if row[0] in (*ended, failed)}
    gpu_h = sum(int(row[2].split("gres/gpu=")[1].split(",")[0]) * int(row[3]) for row in ran.values()) / 3600
    by_end = {group["name"]: group for group in told["by_end"]}
    assert by_end["COMPLETED"]["gpu_h"] + by_end["FAILED"]["gpu_h"] == pytest.approx(gpu_h, rel=0.01)
    assert by_end["COMPLETED"]["jobs"] == len(ended)
    assert by_end["RUNNING"]["jobs"] == 1
    assert {each["gpu_type"]: each["gpus"] for each in told["types"]} == {"a100": 4, "t4": 8}
    assert told["left_out"] == {"jobs without GPUs": 1}
    assert [case["name"] for case in told["what_if"]][:2] == ["as it was", "Slurm's backfill"]
    assert len(told["what_if"]) == 6
    assert sum(told["levels"]["held"]) / len(told["levels"]["held"]) == pytest.approx(
        sum(each["held_gpu_h"] for each in told["types"]) / (told["end_s"] - told["begin_s"]) * 3600, abs=0.01
    )
    text = page.read_text()
    assert "a100" in text
    assert "Slurm&#x27;s backfill" in text
    assert [each.name for each in tmp_path.glob("*page*")] == ["page.html"]


def test_the_cpus_and_the_memory_that_jobs_used(
    make_loopback: MakeLoopback, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One computes on one of its two CPUs and holds 200 of its 1000 MB; the other one sleeps."""
    settings = {"JobAcctGatherType": "jobacct_gather/linux", "JobAcctGatherFrequency": "1"}
    memory = {"SelectTypeParameters": "CR_Core_Memory"}
    slurm = make_loopback("t4:1x4", accounting=True, settings=settings | memory)
    work = "import time; a = bytearray(200 << 20)\nwhile time.process_time() < 4: pass"
    common = ("--parsable", "-o/dev/null", "--gres=gpu:1", "--mem=1000", "-c2")
    busy = slurm.command("sbatch", *common, "--wrap", f"exec {sys.executable} -c '{work}'").stdout.strip()
    idle = slurm.command("sbatch", *common, "--wrap", "exec sleep 8").stdout.strip()

    def over() -> bool:
        return [state for _, state in ends()] == ["COMPLETED"] * 2

    def ends() -> list[list[str]]:
        listing = slurm.command("sacct", "-aXnP", "-j", f"{busy},{idle}", "-o", "ElapsedRaw,State").stdout
        return [line.split("|") for line in listing.splitlines()]

    wait_for(over, 240, "the jobs' ends in the accounts", details=lambda: str(ends()))
    used = read_used(slurm.slurm_conf, time.time() - 3600, time.time() + 1)
    assert used.keys() == {busy, idle}
    assert 3 <= used[busy].cpu_s <= 8
    assert 200 <= used[busy].memory_mb <= 300
    assert used[idle].cpu_s <= 1
    assert used[idle].memory_mb < 100
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    monkeypatch.setattr("sys.argv", ["penstock", "observe", "--json", "--used"])
    with pytest.raises(SystemExit, match="0"):
        main()
    (group,) = json.loads(capsys.readouterr().out)["by_user"]
    cpu_s = 2 * sum(int(elapsed) for elapsed, _ in ends())
    assert group["cpu_used"] == pytest.approx(sum(each.cpu_s for each in used.values()) / cpu_s)
    assert 0.1 <= group["memory_used"] <= 0.2, "the mean of both"


def test_a_job_that_waits_beside_free_gpus_waits_for_cpus(
    make_loopback: MakeLoopback, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job without GPUs holds all CPUs of the one node."""
    slurm = make_loopback("t4:1x4", accounting=True)
    cpus = re.search(r"CPUTot=(\d+)", slurm.command("scontrol", "show", "node", "t4-00").stdout)
    assert cpus is not None
    begin_s = time.time()
    slurm.command("sbatch", "-o/dev/null", f"-c{cpus[1]}", "--wrap", "exec sleep 600")
    slurm.command("sbatch", "-o/dev/null", "--gres=gpu:1", "--wrap", "true")

    def states() -> str:
        return slurm.command("sacct", "-aXnP", "-o", "State").stdout

    wait_for(lambda: sorted(states().split()) == ["PENDING", "RUNNING"], 60, "one runs and one waits", details=states)
    time.sleep(max(begin_s + 10 - time.time(), 0))
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    begin = datetime.fromtimestamp(begin_s).isoformat(timespec="seconds")
    monkeypatch.setattr("sys.argv", ["penstock", "observe", "--json", "--from", begin])
    with pytest.raises(SystemExit, match="0"):
        main()
    waited_h = json.loads(capsys.readouterr().out)["waited_h"]
    assert waited_h[BESIDE] >= 0.7 * sum(waited_h.values()) > 0, waited_h


def test_the_jobs_that_idled_are_named_and_no_others(
    make_loopback: MakeLoopback,
    prometheus: ServeSamples,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An exporter in the place of NVIDIA's, which asks Slurm which jobs run. Their names say how busy they are."""
    slurm = make_loopback("t4:1x4", accounting=True)

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = ["# TYPE nvidia_gpu_duty_cycle gauge"]
            for row in slurm.command("squeue", "-h", "-t", "RUNNING", "-o", "%i %j %u").stdout.splitlines():
                job, percent, _ = row.split()
                lines.append(f'nvidia_gpu_duty_cycle{{ordinal="{job}",uuid="GPU-{job}",jobid="{job}"}} {percent}')
            text = "\n".join(lines).encode() + b"\n"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = prometheus(exporter=f"127.0.0.1:{server.server_port}")
        since = datetime.now().isoformat(timespec="seconds")

        def submit(percent: int) -> str:
            options = ("--parsable", "-o/dev/null", "--gres=gpu:1", f"--job-name={percent}", "--wrap", "sleep 12")
            return slurm.command("sbatch", *options).stdout.strip()

        busy, idle, runs = submit(90), submit(0), submit(40)

        def all_over() -> bool:
            listing = slurm.command("sacct", "-aXDnP", "-o", "JobIDRaw,State").stdout.split()
            return {f"{job}|COMPLETED" for job in (busy, idle, runs)} <= {*listing}

        wait_for(all_over, 180, "the jobs' ends in the accounts")
        server.shutdown()
    monkeypatch.setenv("SLURM_CONF", str(slurm.slurm_conf))
    words = ("observe", "--json", "--from", since, "--prometheus", url, "--step", "1")
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit, match="0"):
        main()
    told = json.loads(capsys.readouterr().out)
    assert [(job["job_id"], job["busy"]) for job in told["use"]["idle_jobs"]] == [(idle, 0.0)]
    held = sum(each["held_gpu_h"] for each in told["types"])
    assert told["use"]["seen_gpu_h"] == pytest.approx(held)
    assert told["use"]["busy_gpu_h"] == pytest.approx(held * 1.3 / 3, rel=0.1)
    monkeypatch.setattr("sys.argv", ["penstock", *(word for word in words if word != "--json")])
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = capsys.readouterr().out
    assert "Jobs whose GPUs were at 0 % for at least half of their time:" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if row[1:3] == ["root", "COMPLETED"]] == [idle]
    assert "LIMIT USED  BUSY" in shown


def test_without_accounting_it_says_so(
    loopback, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(loopback.slurm_conf))
    monkeypatch.setattr("sys.argv", ["penstock", "observe"])
    assert main() == 1
    assert "no accounting" in capsys.readouterr().err
