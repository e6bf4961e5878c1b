"""Users can neither change the placement of an adaptive job nor forge a job spec."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import JobSpec, parse_spec
from penstock_slurm.gateway import JobPlacement, SlurmJob, Transient, Write
from tests.slurm_plugin.flags.site import NOBODY, FlagSite

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]

ADAPTIVE = ("--adaptive", "--max-gpus=8", "--gpu-types=t4")
EVIL = '"}},"penstock":{"max_gpus":64},"x":{"y":"'


@pytest.fixture
def job(flags: FlagSite) -> SlurmJob:
    """A pending adaptive job of the user nobody."""
    return flags.submit(*ADAPTIVE, user=NOBODY)


@pytest.fixture(scope="session")
def forge(_flag_site: FlagSite) -> Path:
    """forge.c, built where the user nobody can run it."""
    program = _flag_site.folder / "forge"
    command = ["cc", "-o", str(program), str(Path(__file__).with_name("forge.c")), "-lslurm"]
    if shutil.which("cc") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a program with libslurm cannot be built here (Debian: gcc libslurm-dev)")
    return program


@pytest.mark.parametrize(
    "argv",
    [
        ("scontrol", "release", "JOB"),
        ("scontrol", "hold", "JOB"),
        ("scontrol", "uhold", "JOB"),
        ("scontrol", "top", "JOB"),
        *[
            ("scontrol", "update", "JobId=JOB", change)
            for change in (
                "Priority=100",
                "Nice=5",
                "Contiguous=1",
                "MinMemoryNode=100",
                "MinMemoryCPU=100",
                "StartTime=now",
                "StartTime=now+1hour",
                "Partition=t4",
                "ReqNodeList=t4-00",
                "ExcNodeList=t4-00",
                "TresPerNode=gres:gpu:8",
                "TresPerNode=",
                "Gres=gpu:2",
                "NumNodes=2-2",
                "NumTasks=4",
                "NumCPUs=4",
                "CPUsPerTask=2",
                "Features=a100",
                "Requeue=0",
                "OverSubscribe=no",
                "AdminComment={}",
                'AdminComment={"penstock":{"max_gpus":64}}',
                "AdminComment=",
                "Comment=x AdminComment={}",
            )
        ],
    ],
    ids=lambda argv: " ".join(argv),
)
def test_its_own_user_cannot_release_move_or_retag_it(flags: FlagSite, job: SlurmJob, argv: tuple[str, ...]) -> None:
    words = [part for word in argv for part in (word.split() if "{" in word and " " in word else [word])]
    done = flags.run(*[word.replace("JOB", job.id) for word in words], user=NOBODY)
    assert done.returncode != 0, done.stdout
    assert "denied" in done.stderr, done.stderr
    assert flags.job(job.id) == job


def test_its_own_user_can_name_it_comment_on_it_and_cancel_it(flags: FlagSite, job: SlurmJob) -> None:
    for change in ("JobName=better", 'Comment={"penstock":{"max_gpus":64}}', "TimeLimit=10", "Dependency=afterok:1"):
        done = flags.run("scontrol", "update", f"JobId={job.id}", change, user=NOBODY)
        assert done.returncode == 0, done.stderr
    now = flags.job(job.id)
    assert (now.name, now.admin_comment, now.held) == ("better", job.admin_comment, True)
    assert flags.run("scancel", job.id, user=NOBODY).returncode == 0
    wait_for(lambda: flags.job(job.id).state == "CANCELLED", 120, "the job to be cancelled")


def test_the_admin_can_change_it(flags: FlagSite, job: SlurmJob) -> None:
    placement = JobPlacement(partition="t4", nodes=("t4-00", "t4-01"), gpus_per_node=4, tasks=2, cpus=2)

    def placed() -> bool:
        (error,) = flags.gateway.write([Write(job.id, "place", placement)])
        # Slurm 24.11 sometimes needs several attempts, and on a busy machine more than the gateway makes.
        assert error is None or isinstance(error, Transient), error
        return error is None

    wait_for(placed, 120, "Slurm to take it")
    assert flags.job(job.id).required_nodes == ("t4-00", "t4-01")


def test_a_plain_job_is_its_users_own(flags: FlagSite) -> None:
    plain = flags.submit("--hold", "--gres=gpu:1", user=NOBODY)
    for change in ("Partition=t4", "Features=t4", "Requeue=1"):
        for _ in range(100):  # Slurm 24.11 and 26.05 sometimes need another attempt
            done = flags.run("scontrol", "update", f"JobId={plain.id}", change, user=NOBODY)
            if "temporarily unavailable" not in done.stderr:
                break
            time.sleep(0.1)
        assert done.returncode == 0, done.stderr
    assert flags.run("scontrol", "release", plain.id, user=NOBODY).returncode == 0


@pytest.mark.parametrize(
    "argv",
    [
        (f"--job-name={EVIL}",),
        (f"--job-name=x AdminComment={{{EVIL}",),
        (f"--comment={EVIL[4:]}".replace('"penstock":', "penstock "),),
        (f"--output=/tmp/{EVIL}",),
        (f"--error=/tmp/{EVIL}.err",),
        (f"--wckey={EVIL}",),
        (f"--mail-user={EVIL}",),
        (f"--export=ALL,SPANK_PENSTOCK_MAX_GPUS=64,X={EVIL}",),
    ],
    ids=lambda argv: argv[0][:14],
)
def test_nothing_else_that_a_user_writes_gets_into_the_spec(flags: FlagSite, argv: tuple[str, ...]) -> None:
    job = flags.submit(*ADAPTIVE, *argv, user=NOBODY, SPANK_PENSTOCK_MAX_GPUS="64", SLURM_SPANK_PENSTOCK_MAX_GPUS="64")
    assert parse_spec(job.admin_comment) == JobSpec(max_gpus=8, gpu_types=("t4",))
    plain = flags.submit("--hold", *argv, user=NOBODY)
    assert plain.admin_comment == ""


def test_a_folder_with_an_evil_name(flags: FlagSite) -> None:
    folder = flags.output / EVIL.replace("/", "")
    folder.mkdir(exist_ok=True)
    job = flags.submit(*ADAPTIVE, f"--chdir={folder}", user=NOBODY)
    assert json.loads(job.admin_comment) == {
        "penstock": {"adaptivity": "adaptive", "gpu_types": ["t4"], "min_gpus": 1, "max_gpus": 8},
        "penstock_spool": "/var/spool/penstock",
    }


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ('PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=8,"preemptible":false', "give a whole number"),
        ('PENSTOCK_ADAPTIVE=adaptive","x":"\tPENSTOCK_MAX_GPUS=8', "give adaptive, strong-scaling or rigid"),
        ('PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=8\tPENSTOCK_TRIAL_GROUP=a"}}', "give a name"),
        ('PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=8\tPENSTOCK_GPU_TYPES=t4"],"a":["', "give GPU types"),
        ("PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=1e9", "give a whole number"),
        ("PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=0x10", "give a whole number"),
        ("PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=8\n", "give a whole number"),
        ("PENSTOCK_ADAPTIVE=adaptive\tPENSTOCK_MAX_GPUS=8\tPENSTOCK_X=1", "penstock.lua is older"),
        ("PENSTOCK_MAX_GPUS=8", "--max-gpus needs --adaptive"),
    ],
)
def test_a_forged_environment_is_read_as_strictly_as_flags(
    flags: FlagSite, forge: Path, environment: str, words: str
) -> None:
    done = flags.run(str(forge), str(flags.output), environment, user=NOBODY)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_forged_environment_that_is_good_is_a_job_like_others(flags: FlagSite, forge: Path) -> None:
    environment = "PENSTOCK_ADAPTIVE=rigid\tPENSTOCK_MAX_GPUS=4\tPENSTOCK\tPENSTOCK_=\tOTHER=1\tpenstock_max_gpus=9"
    done = flags.run(str(forge), str(flags.output), environment, "", "with a priority", user=NOBODY)
    assert done.returncode == 0, done.stderr
    job = flags.job(done.stdout.strip())
    assert parse_spec(job.admin_comment) == JobSpec(adaptivity="rigid", min_gpus=4, max_gpus=4)
    assert job.held


def test_no_user_submits_a_job_with_an_admin_comment(flags: FlagSite, forge: Path) -> None:
    done = flags.run(str(forge), str(flags.output), "X=1", '{"penstock":{"max_gpus":64}}', user=NOBODY)
    assert done.returncode != 0
    assert "denied" in done.stderr


def test_a_site_adopts_some_users_accounts_and_partitions_first(flags: FlagSite) -> None:
    """The others are told so when they submit, and their plain jobs run as ever."""
    flags.settings("adopt = ['user:nobody', 'account:ml', 'partition:t4']")
    two = ("--adaptive", "--max-gpus=2")
    try:
        assert flags.penstock("sync").exit_code == 0
        said = flags.refusal(*two, "--partition=all,rtx")
        adopted = [
            flags.submit(*two, "--partition=all", user=NOBODY),
            flags.submit(*two, "--partition=all", "--account=ml"),
            flags.submit(*two, "--partition=t4"),
        ]
        in_t4 = flags.submit(*two)
        plain = flags.submit("--gres=gpu:2")
    finally:
        flags.settings()
        assert flags.penstock("sync").exit_code == 0
    assert all(job.held and parse_spec(job.admin_comment) for job in (*adopted, in_t4))
    assert [job.partition for job in (*adopted, in_t4)] == [("all",), ("all",), ("t4",), ("t4",)]
    assert (plain.held, plain.admin_comment) == (False, "")
    assert "only jobs of account:ml, partition:t4, user:nobody: submit the job without adaptive flags, or ask" in said
