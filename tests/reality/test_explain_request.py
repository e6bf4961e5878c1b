"""`penstock submit --explain-request` says of each header what sbatch says when it submits it, and submits nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock_slurm.submit.cli import app
from tests.reality.differential import Differential, running
from tests.reality.test_headers import SITE, headers

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Differential]:
    with running(tmp_path_factory.mktemp("explained"), SITE) as differential:
        yield differential


@pytest.fixture
def explained(site: Differential, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """explained(HEADER, *options): the answer about a script with this header, run where sbatch finds it."""
    for name, value in site.cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(site.cluster.folder)

    def run(header: str, *options: str) -> Result:
        Path("train.sh").write_text(f"#!/bin/sh\n#SBATCH {header}\nsleep 600\n")
        return CliRunner().invoke(app, ["--explain-request", *options, "train.sh"])

    return run


def told(text: str) -> list[str]:
    """Penstock's own lines."""
    return re.findall(r"penstock: .*", text)


def test_it_says_of_every_header_what_sbatch_then_says(site: Differential, explained: Callable[..., Result]) -> None:
    differ = {}
    for header in dict.fromkeys(headers()):
        result = explained(header)
        done = site.cluster.command("sbatch", "--adaptive", "train.sh", check=False)
        before, after = (result.exit_code == 0, told(result.output)), (done.returncode == 0, told(done.stderr))
        if before != after:
            differ[header] = (result.output, done.stderr)
    site.clean()
    assert differ == {}


def test_it_submits_nothing_and_says_how_the_header_is_read(
    site: Differential, explained: Callable[..., Result]
) -> None:
    result = explained("--nodes=2 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=6 --mem=64G --time=60 -p all")
    assert (result.exit_code, result.stderr) == (0, "")
    read = "1 to 16 GPUs, on at most 2 nodes, in partition all, one task for each GPU, 6 CPUs for each task, 8192 MB for each"
    assert f"the job can have {read} GPU, for at most 01:00:00. In flags" in result.stdout
    assert "to start at" not in result.output
    assert site.command("squeue", "-h") == ""


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ("--gres=gpu:a100:4 -t 3-2:00", ["1 to 4 GPUs of type a100", "for at most 3-02:00:00", "--gpu-types=a100"]),
        ("--gpus=2 --gpu-types=^t4,^rtx -t UNLIMITED", ["of any type but t4 or rtx", "without a time limit", "=^t4,^rtx"]),
        ("--max-gpus=2 --gpu-types=a100,rtx -N 2", ["of type a100 or rtx", "on at most 2 nodes", "--max-gpus=2"]),
        ("--gres=gpu:8 -C 'a100|rtx' -w rtx-01 -x rtx-00", ["on nodes with a100|rtx", "among rtx-01", "not on rtx-00"]),
        ("--gpus=2 --cpus-per-gpu=4 --mem-per-gpu=2G", ["4 CPUs for each GPU", "2048 MB for each GPU", "limit of its partition"]),
        ("--gpus=4 -N 1 -c 6 --mem=0", ["whole nodes", "1 to 8 GPUs", "6 CPUs for each task"]),
        ("--gpus=4 -N 1 -c 6 --mem-per-cpu=100 -p all", ["1.5 CPUs for each GPU", "100 MB for each CPU", "in partition all"]),
        ("--gpus=1 -L scratch:2", ["with licences scratch:2"]),
        ("--adaptive --max-gpus=4 --mem=8G", ["1 to 4 GPUs", "8192 MB for each node"]),
    ],
)  # fmt: skip
def test_it_says_everything_that_was_read(explained: Callable[..., Result], header: str, parts: list[str]) -> None:
    result = explained(header)
    assert result.exit_code == 0, result.output
    assert [part for part in parts if part not in result.stdout] == [], result.stdout


def test_it_gives_all_refusals_at_once(site: Differential, explained: Callable[..., Result]) -> None:
    result = explained("--gpus-per-node=2 --gpu-types=h100 --nodelist=nix-01", "--min-gpus=2")
    assert result.exit_code != 0
    assert result.stdout == ""
    assert len(told(result.stderr)) >= 2, result.stderr
    assert "there are no GPUs of type h100 here" in result.stderr
    assert site.command("squeue", "-h") == ""
