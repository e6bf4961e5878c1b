"""`penstock submit --convert` writes the header for Penstock: Slurm notes the same job, and a second time it changes nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock_slurm.gateway import SlurmJob
from penstock_slurm.submit.cli import app
from tests.reality.differential import Differential, running
from tests.reality.test_headers import DATA, SITE, headers, published, record

pytestmark = pytest.mark.slurm

BODY = b"\nexport NAME='a  b'\n#SBATCH --hold\n##SBATCH --gres=gpu:1\nsrun python train.py \\\n  --x\t\xff\xfe\x00\f\r\n \n"
"""What follows the header, which sbatch does not read; its last line has no end."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Differential]:
    with running(tmp_path_factory.mktemp("converted"), SITE) as differential:
        yield differential


@pytest.fixture
def convert(site: Differential, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """convert(SCRIPT, *options): the answer about this script."""
    for name, value in site.cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(site.cluster.folder)

    def run(script: bytes, *options: str) -> Result:
        Path("old.sh").write_bytes(script)
        return CliRunner().invoke(app, ["--convert", *options, "old.sh"])

    yield run
    site.clean()


def script_of(*lines: str) -> bytes:
    return "\n".join(["#!/bin/sh", *lines, "sleep 600", ""]).encode()


def submitted(site: Differential, script: bytes, *options: str) -> SlurmJob | None:
    """Slurm's record of the job; None if it is refused."""
    Path("submitted.sh").write_bytes(script)
    done = site.cluster.command("sbatch", "--parsable", "-o/dev/null", *options, "submitted.sh", check=False)
    return record(site, done.stdout.strip().partition(";")[0]) if done.returncode == 0 else None


def shape(job: SlurmJob | None) -> object:
    """All that Slurm notes of it but its number and times."""
    changing = {"id": "", "number": 0, "submit_s": 0.0, "eligible_s": 0.0, "array_job_id": None}
    return job and dataclasses.replace(job, **changing)


def test_the_converted_header_is_noted_as_the_old_one_with_adaptive(
    site: Differential, convert: Callable[..., Result]
) -> None:
    differ, converted = {}, []
    for header in dict.fromkeys(headers()):
        old = script_of(f"#SBATCH {header}")
        result = convert(old)
        new = result.stdout_bytes
        if (wanted := submitted(site, old, "--adaptive")) is None:
            differ |= {header: result.output} if result.exit_code == 0 or new else {}
            continue
        again = convert(new)
        converted.append(header)
        if (result.exit_code, shape(submitted(site, new))) != (0, shape(wanted)) or (
            (again.exit_code, again.stdout_bytes) != (0, new)
        ):
            differ[header] = result.output + again.output
        site.clean()
    assert differ == {}
    assert len(converted) >= 40
    assert [header for header in published() if header not in converted and "hetjob" not in header] == []


@pytest.mark.skipif(DATA is None, reason="PENSTOCK_TEST_DATA names no public data")
def test_a_heterogeneous_job_of_the_public_headers_is_refused(convert: Callable[..., Result]) -> None:
    (header,) = (header for header in published() if "hetjob" in header)
    result = convert(script_of(*(f"#SBATCH {part}" for part in header.replace(" hetjob ", "\nhetjob\n").split("\n"))))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "#SBATCH hetjob: a heterogeneous job cannot be adaptive" in result.stderr


FORMS = [
    ("#SBATCH --gres=gpu:2 # two", "#SBATCH -N1", "#SBATCH --gres=gpu:4 -t 5"),  # the last one counts
    (
        "",
        "# cluster",
        "##SBATCH --gres=gpu:8",
        "## SBATCH -C a100",
        "#SBATCH --gres=gpu:1",
        "# SBATCH -N 2",
        "",
        "#  end",
    ),
    ("#SBATCH -N 2 -n 16 -c 2 --gpus-per-node=8 --mem=32G -J 'my  job' --comment=\"a # 'b'\"",),
    ("#SBATCH  --gpus 2", '#SBATCH\t-J a\\"b', "#SBATCH", "#SBATCH--time=5", "###SBATCH --hold", " #SBATCH --hold"),
    ("#SBATCH --gpus=rtx:2 --export=NONE --quiet", "#SBATCH --mail-type ALL --output=logs/%x-%j.out"),
    ("#SBATCH --adaptive=strong-scaling --max-gpus=4 --checkpointable", "#SBATCH -N 1 --mem=8G"),
    ("#SBATCH --adaptive=rigid --gres=gpu:a100:4",),
    ("#SBATCH --gpus=4 --min-g 2 --gpu-types ^t4", "#SBATCH --array=0-3%2 --dependency=singleton --requeue"),
]


@pytest.mark.parametrize("lines", FORMS, ids=lambda lines: lines[-1])
def test_all_other_bytes_stay(site: Differential, convert: Callable[..., Result], lines: tuple[str, ...]) -> None:
    old = (
        "\n".join(["#!/bin/bash -l", *lines]).encode()
        + b"\n# \xe9t\xe9"
        + BODY.replace(b"\x00", b"").replace(b"\r", b"")
    )
    result = convert(old)
    assert result.exit_code == 0, result.stderr
    kept, added = old.split(b"\n"), result.stdout_bytes.split(b"\n")
    new = [line for line in added if line.startswith(b"#SBATCH --") and line not in kept]
    assert len(new) == 1
    added.remove(new[0])
    assert added == kept
    assert shape(submitted(site, result.stdout_bytes)) == shape(
        submitted(site, old, *([] if "--adaptive" in lines[0] else ["--adaptive"]))
    )
    assert convert(result.stdout_bytes).stdout_bytes == result.stdout_bytes


def test_what_the_line_says_is_written_too(site: Differential, convert: Callable[..., Result]) -> None:
    old = script_of("#SBATCH --gres=gpu:4 --max-gpus=3 -t 5")
    result = convert(old, "--min-gpus=2", "--max-gpus", "8", "--checkpointable", "--qos=", "-N2")
    assert b"#SBATCH --adaptive --min-gpus=2 --max-gpus=8 --checkpointable\n" in result.stdout_bytes, result.output
    job = submitted(site, result.stdout_bytes)
    assert job is not None
    assert '"checkpointable":true,"min_gpus":2,"max_gpus":8' in job.admin_comment


def test_a_refused_line_is_a_comment_above_the_line_to_write_instead(
    site: Differential, convert: Callable[..., Result]
) -> None:
    result = convert(
        script_of("#SBATCH --gres=gpu:2 --no-requeue -t 5 # once", "#SBATCH -H", "#SBATCH -C 'a100&[rtx]'")
    )
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1].startswith("# penstock: --no-requeue cannot be used with --adaptive")
    assert lines[2:4] == [
        "##SBATCH --gres=gpu:2 --no-requeue -t 5 # once",
        "#SBATCH --gres=gpu:2 -t 5 --non-preemptible",
    ]
    assert lines[4] == "#SBATCH --adaptive --min-gpus=1 --max-gpus=2"
    assert lines[5].startswith("# penstock: --hold cannot be used")
    assert lines[7].startswith("# penstock: --constraint=a100&[rtx] cannot be used")
    assert lines[6::2] == ["##SBATCH -H", "##SBATCH -C 'a100&[rtx]'"]
    assert lines[9:] == ["sleep 600"]
    assert all(option in result.stderr for option in ("--no-requeue", "--hold", "--constraint"))
    again = convert(result.stdout_bytes)
    assert (again.exit_code, again.stdout_bytes) == (0, result.stdout_bytes)
    job = submitted(site, result.stdout_bytes)
    assert job is not None
    assert '"preemptible":false' in job.admin_comment


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("--gres=gpu:a100:1,nvme:50 -t 5", "-t 5 --gres=gpu:a100:1"),
        ("--gres nvme:10,gpu:1", "--gres=gpu:1"),
        ("--gpus-per-socket=a100:2 --sockets-per-node=2", "--sockets-per-node=2 --gpus-per-node=a100:4"),
        ("--exclusive=user --gpus-per-node=8", "--gpus-per-node=8 --exclusive"),
        ("--gpus=2 --ntasks-per-socket=1 --ntasks-per-node=2 -N1", "--gpus=2 --ntasks-per-node=2 -N1"),
    ],
)
def test_lines_of_public_scripts_that_are_refused_are_replaced(
    site: Differential, convert: Callable[..., Result], line: str, instead: str
) -> None:
    result = convert(script_of(f"#SBATCH {line}"))
    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[2:4]) == (1, [f"##SBATCH {line}", f"#SBATCH {instead}"]), result.output
    assert submitted(site, result.stdout_bytes) is not None
    assert convert(result.stdout_bytes).stdout_bytes == result.stdout_bytes


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (script_of("#SBATCH --gres=gpu:1").replace(b"\n", b"\r\n"), "DOS line breaks"),
        (script_of("#SBATCH --gres=gpu:1 --no-such-option"), "unrecognized option"),
        (script_of("#SBATCH --gres=gpu:1 -J 'a"), "Unmatched"),
        (script_of("#SBATCH --gres=gpu:1 -J a b"), "Invalid directive"),
        (script_of("#SBATCH --gres=gpu:1 --mem=2000G"), "no node could ever run the job"),
        (script_of("true", "#SBATCH --gres=gpu:1"), "needs the most GPUs"),
        (b"#SBATCH --gres=gpu:1\n", "does not look like a batch script"),
    ],
)
def test_what_cannot_be_read_is_not_printed(convert: Callable[..., Result], script: bytes, said: str) -> None:
    result = convert(script)
    assert (result.exit_code != 0, result.stdout) == (True, "")
    assert said in result.stderr.replace("This does", "this does").replace("batch  script", "batch script")


def test_the_program_writes_the_very_bytes_into_a_file_and_reads_standard_input(
    site: Differential, convert: Callable[..., Result]
) -> None:
    """Its output is made visible on a terminal; a file is not."""
    del convert
    old = b"#!/bin/sh\n#SBATCH --gres=gpu:1\n" + BODY.replace(b"\x00", b"").replace(b"\r", b"")
    program = [str(Path(sys.executable).with_name("penstock")), "submit", "--convert"]
    done = subprocess.run(program, input=old, env=os.environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == old.replace(b"gpu:1\n", b"gpu:1\n#SBATCH --adaptive --min-gpus=1 --max-gpus=1\n", 1)
