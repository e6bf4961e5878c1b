"""`penstock submit` calls the real sbatch: with the plugin of the flags, and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_scheduler.model import JobSpec, parse_spec
from tests.slurm_plugin.flags.site import FlagSite, other_messages

pytestmark = pytest.mark.slurm

PROGRAM = (sys.executable, "-c", "from penstock_slurm.submit.cli import app; app()")

FORKING = """
import json, os, sys
from penstock_slurm.submit.cli import app

for line in sys.stdin:
    argv, environment, folder, out, err = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in enumerate((os.devnull, out, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = ["submit", *argv]
        app()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that loads the program once and forks for each command, because loading takes seconds on a busy machine."""

Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(flags: FlagSite, tmp_path: Path) -> dict[str, str]:
    """A user's home with a preset, and the site's presets with one of the same name and another."""
    folder, site = tmp_path / "penstock", tmp_path / "site.toml"
    folder.mkdir()
    (folder / "presets.toml").write_text("[big]\nadaptive = true\nmax-gpus = 16\ngpu-types = 'rtx'\ntime = 30\n")
    site.write_text("[big]\nmax-gpus = 1\n[small]\nadaptive = true\nmax-gpus = 2\n")
    return {"XDG_CONFIG_HOME": str(tmp_path), "PENSTOCK_PRESETS": str(site)}


@pytest.fixture
def script(flags: FlagSite) -> str:
    path = flags.folder / "train.sh"
    path.write_text('#!/bin/sh\n#SBATCH --job-name=mine --output=job-%j.out\necho "$@"\n')
    return str(path)


def without_plugin(flags: FlagSite) -> dict[str, str]:
    """A host on which the plugin is not installed: its slurm.conf has no plugstack.conf beside it."""
    folder = flags.folder / "etc-without-plugin"
    folder.mkdir(exist_ok=True)
    for path in flags.etc.iterdir():
        if path.suffix == ".conf" and path.name != "plugstack.conf":
            (folder / path.name).write_text(path.read_text())
    return {"SLURM_CONF": str(folder / "slurm.conf")}


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def submit(flags: FlagSite, forking: subprocess.Popen[str], tmp_path: Path) -> Submit:
    """submit(*argv, **environment): the program as a user runs it."""
    out, err = tmp_path / "out", tmp_path / "err"

    def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        assert forking.stdin is not None
        assert forking.stdout is not None
        words = (argv, flags.environment(**environment), str(flags.output), str(out), str(err))
        forking.stdin.write(json.dumps(words) + "\n")
        forking.stdin.flush()
        status = int(forking.stdout.readline())
        return subprocess.CompletedProcess(argv, status, out.read_text(), err.read_text())

    return run


def test_a_preset_stands_for_its_flags_and_what_comes_later_wins(
    flags: FlagSite, submit: Submit, home: dict[str, str], script: str
) -> None:
    done = submit("--parsable", "--preset", "big", "--max-gpus=8", script, "a", "--preset", **home)
    assert (done.returncode, other_messages(done.stderr)) == (0, "")
    job = flags.job(done.stdout.strip())
    assert parse_spec(job.admin_comment) == JobSpec(max_gpus=8, gpu_types=("rtx",))
    assert (job.name, job.time_limit_s, job.held) == ("mine", 1800, True)
    done = submit("--parsable", "--max-gpus=8", "--preset=small", script, **home)
    spec = parse_spec(flags.job(done.stdout.strip()).admin_comment)
    assert spec == JobSpec(max_gpus=2)
    done = submit("--preset=nix", script, **home)
    assert done.returncode == 1
    assert "there is no preset nix; the presets are big, small; write [nix] into" in done.stderr


def test_all_else_is_sbatchs_own(flags: FlagSite, submit: Submit, script: str) -> None:
    """It prints the same and has the same exit status, for refusals and for arguments of all kinds."""
    for argv in (
        ("--hold", script),
        ("--no-such-option", script),
        ("--adaptive", "--max-gpus=zero", script),
        ("--adaptive", "--max-gpus=2", "--min-gpus=4", script),
        ("--hold", "--parsable", "--", script, "--dry-run"),
        ("-W", "-Q", "--wrap", "exit 3"),
    ):
        ours, theirs = submit(*argv), flags.run("sbatch", *argv)
        assert ours.returncode == theirs.returncode, argv
        assert ours.stderr == theirs.stderr
        assert [word for word in ours.stdout.split() if not word.isdigit()] == [
            word for word in theirs.stdout.split() if not word.isdigit()
        ]


def test_arguments_reach_the_script_as_they_are(flags: FlagSite, script: str) -> None:
    done = flags.run(*PROGRAM, "--parsable", "--wait", script, "a b", "--dry-run", "--preset", "*", "")
    assert flags.text(done.stdout.strip()) == "a b --dry-run --preset * \n"


def test_without_the_plugin_the_spec_is_in_the_comment(
    flags: FlagSite, submit: Submit, home: dict[str, str], script: str
) -> None:
    bare = without_plugin(flags) | home
    assert "--adaptive" not in flags.run("sbatch", "--help", **bare).stdout
    done = submit("--parsable", "--preset", "big", "--min-gpus", "2", script, **bare)
    assert (done.returncode, done.stderr) == (0, "")
    job = flags.job(done.stdout.strip())
    assert parse_spec(job.comment) == JobSpec(min_gpus=2, max_gpus=16, gpu_types=("rtx",))
    assert (job.admin_comment, job.held, job.requeue) == ("", True, True)
    assert (job.gpus_per_node, job.gpu_type, job.time_limit_s) == (2, None, 1800)
    done = submit("--parsable", script, PENSTOCK_ADAPTIVE="rigid", PENSTOCK_MAX_GPUS="3", **bare)
    assert json.loads(flags.job(done.stdout.strip()).comment)["penstock"]["min_gpus"] == 3
    plain = submit("--parsable", "--hold", script, PENSTOCK_MAX_GPUS="3", **bare)
    assert flags.job(plain.stdout.strip()).comment == ""
    for argv, words in (
        (("--adaptive", "--max-gpus=zero"), "penstock: --max-gpus=zero: give a whole number"),
        (("--max-gpus=2",), "penstock: --max-gpus needs --adaptive"),
        (("--adaptive", "--max-gpus=2", "--min-gpus=4"), "max_gpus=2 is less than min_gpus=4"),
        (("--adaptive", "--max-gpus=2", "--gres=gpu:1"), "--gres cannot be used with --adaptive"),
        (("--adaptive", "--max-gpus=2", "--comment=x"), "the comment holds the job spec"),
    ):
        done = submit(*argv, script, **bare)
        assert done.returncode == 1
        assert words in done.stderr
    lines = flags.folder / "lines.sh"
    lines.write_text("#!/bin/sh\n#SBATCH --adaptive\ntrue\n")
    done = submit("--max-gpus=2", "--adaptive", str(lines), **bare)
    assert "has adaptive flags in #SBATCH lines, but this sbatch does not know them" in done.stderr


def test_a_dry_run_without_penstockd_says_so_and_submits_nothing(
    flags: FlagSite, submit: Submit, home: dict[str, str], script: str
) -> None:
    """tests/end_to_end/test_submit.py has the answers of a penstockd."""
    before = flags.gateway.jobs()
    away = {"PENSTOCK_URL": f"unix:{flags.folder}/none.sock"}
    done = submit("--dry-run", "--adaptive", "--max-gpus=8", script, **away)
    assert (done.returncode, done.stdout) == (3, "")
    assert "penstockd" in done.stderr
    done = submit("--dry-run", "--adaptive", "--max-gpus=2", "--partition=a b", script, **away)
    assert done.returncode == 1
    assert "partition" in done.stderr
    assert "to start at" in submit("--dry-run", script).stderr, "Slurm explains a plain job"
    assert flags.gateway.jobs() == before
