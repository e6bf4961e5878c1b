"""`penstock observe` beside a real Slurm with accounting: what it says is what sacct says, and it runs no command that writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.cli import main

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
    monkeypatch.setattr("sys.argv", ["penstock", "observe", "--json", "--what-if"])
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


def test_without_accounting_it_says_so(
    loopback, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(loopback.slurm_conf))
    monkeypatch.setattr("sys.argv", ["penstock", "observe"])
    assert main() == 1
    assert "no accounting" in capsys.readouterr().err
