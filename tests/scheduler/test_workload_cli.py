"""`penstock simulate workload` as a user meets it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from penstock_scheduler.cli import make_app
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.workloads import read_workload
from tests.scheduler.simulator.toy import write_profiles


def penstock_workload(*argv: object) -> Result:
    result = CliRunner().invoke(make_app(), ["simulate", "workload", *map(str, argv)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # as `main` sees it
    return result


def test_generate_then_check_then_show(tmp_path):
    """As the page says, without any file from elsewhere."""
    out = tmp_path / "week.csv"
    made = penstock_workload("generate", "--jobs", 40, "--models", "--seed", 7, "--out", out)
    assert "40 jobs" in made.output
    assert "nothing wrong" in penstock_workload("check", out, "--cluster", "t4:6x4,a100:2x8").output
    again = tmp_path / "again.csv"
    penstock_workload("generate", "--jobs", 40, "--models", "--seed", 7, "--out", again)
    assert again.read_text() == out.read_text()
    shown = penstock_workload("show", out, "--cluster", "t4:6x4,a100:2x8").output
    assert "40 of" in shown
    assert "GPU-h" in shown


def test_import_a_sites_history(tmp_path):
    history, out = tmp_path / "history.txt", tmp_path / "month.json"
    history.write_text(
        "JobIDRaw|User|Account|State|Submit|ElapsedRaw|TimelimitRaw|ReqTRES|AllocTRES|JobName\n"
        "7|ada|lab|COMPLETED|2026-11-02T10:00:00|3600|60|gres/gpu=2|cpu=8,gres/gpu:t4=2,gres/gpu=2|train\n"
        "8|ada|lab|COMPLETED|2026-11-02T12:00:00|10|60|cpu=1|cpu=1|count\n"
    )
    done = penstock_workload("import", "--sacct", history, "--out", out)
    assert "1 jobs; 1 jobs without GPU left out" in done.output
    (job,) = read_workload(out).jobs
    assert (job.id, job.gpus, job.gpu_type, job.duration_s, job.time_limit_s) == ("7", 2, "t4", 3600, 3600)


def test_import_a_window(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("id,submit_s,gpus,duration_s\na,0,1,5\nb,7200,1,5\nc,14400,1,5\n")
    penstock_workload("import", trace, "--begin-h", 1, "--hours", 2, "--out", tmp_path / "x.csv")
    assert [(job.id, job.submit_s) for job in read_workload(tmp_path / "x.csv").jobs] == [("b", 3600)]


def test_show_counts_and_times(tmp_path):
    """Two GPUs for an hour and one for three, within an hour: 5 GPU-h keep 5 GPUs busy, of 8 more than half."""
    trace = tmp_path / "trace.csv"
    trace.write_text("id,submit_s,gpus,duration_s\na,0,2,3600\nb,3600,1,10800\n")
    told = json.loads(penstock_workload("show", trace, "--cluster", "t4:2x4", "--json").output)
    assert (told["jobs"], told["span_s"], told["sizes"]) == (2, 3600, {"1": 1, "2": 1})
    assert (told["gpu_hours"], told["load_gpus"], told["load"]) == (5, 5, 0.625)
    assert told["durations_s"]["50"] == 7200


def test_show_times_trainings_by_measured_tables(tmp_path):
    """Batch 8 on one GPU, both epochs: 80 / (8 / 3.6) + 72 / (8 / 3.6) = 68.4 s."""
    profiles, trace = write_profiles(tmp_path / "profiles"), tmp_path / "trace.csv"
    trace.write_text("id,submit_s,gpus,model\na,0,1,toy\n")
    told = json.loads(penstock_workload("show", trace, "--cluster", "t4:1x4", "--profiles", profiles, "--json").output)
    assert told["durations_s"]["100"] == pytest.approx(68.4)


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("id,submit_s,gpus,duration_s\na,-1,1,5\n", (), r"trace\.csv, line 2: found submit_s=-1\.0; expected seconds"),
        (
            "id,submit_s,gpus,model\na,0,1,new\n",
            ("--cluster", "t4:1x4"),
            "job 'a': found the model 'new'; expected one of",
        ),
        ("id,submit_s,gpus,duration_s,gpu_type\na,0,1,5,x1\n", (), "line 2: found the GPU type 'x1'"),
        ("id,submit_s,gpus,duration_s\na,0,1,5\n", ("--profiles", "nowhere"), "nowhere has no model"),
    ],
)
def test_check_says_what_is_wrong(tmp_path, text, arguments, words):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        penstock_workload("check", tmp_path / "trace.csv", *arguments)


def test_one_source_and_a_place_to_write(tmp_path):
    assert penstock_workload("import", "--out", tmp_path / "x.csv").exit_code == 2
    with pytest.raises(ConfigError, match="No such file or directory; name another file with --out"):
        penstock_workload("generate", "--out", tmp_path / "away" / "x.csv")
