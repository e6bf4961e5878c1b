"""How the ordinary headers of training scripts are read when --adaptive is added. Public scripts' headers: tests/reality."""

from __future__ import annotations

import json

import pytest

from penstock_scheduler.model import JobSpec, parse_spec
from tests.slurm_plugin.flags.site import FlagSite

pytestmark = pytest.mark.slurm

WHOLE = {"a100": 8, "rtx": 8, "t4": 4}

CASES = [
    ("--gres=gpu:2", {"max_gpus": 2, "max_nodes": 1}, {}),
    ("--gres=gpu:a100:1 -N 1 -n 8", {"max_gpus": 1, "max_nodes": 1, "gpu_types": ["a100"]}, {"tasks": 8, "gpus": 1}),
    (
        "--nodes=1 --ntasks-per-node=8 --gres=gpu:8 --cpus-per-task=2 --mem=8000",
        {"max_gpus": 8, "max_nodes": 1},
        {"tasks": 1, "gpus": 1, "node_gpus": 8, "memory_mb": 8000},
    ),
    ("--nodes=2 --ntasks=2 --gpus-per-task=1", {"max_gpus": 2, "max_nodes": 2}, {"tasks": 1, "gpus": 1}),
    (
        "--nodes=2 --ntasks-per-node=1 --gpus-per-task=rtx:4",
        {"min_gpus": 4, "max_gpus": 8, "max_nodes": 2, "gpus_per_task": 4, "gpu_types": ["rtx"]},
        {"tasks": 1, "gpus": 4},
    ),
    (
        "--nodes=2 --gpus-per-node=8 --ntasks-per-node=1 --cpus-per-task=16",
        {"max_gpus": 16, "max_nodes": 2},
        {"node_gpus": 8, "cpus": 16},
    ),
    (
        "--nodes=2 --gpus-per-node=8 --ntasks-per-node=1 --exclusive",
        {"max_gpus": 16, "max_nodes": 2, "scale_unit": WHOLE},
        {"whole_nodes": True},
    ),
    ("--nodes=1 --gres=gpu:4 --mem=0", {"max_gpus": 4, "max_nodes": 1}, {}),  # Slurm does not allocate memory here
    ("--gpus=8", {"max_gpus": 8, "max_nodes": 1}, {}),
    (
        "-N 2 --ntasks-per-node=8 --exclusive --mem=0 --overcommit",
        {"max_gpus": 16, "max_nodes": 2, "scale_unit": WHOLE},
        {"tasks": 1, "gpus": 1, "whole_nodes": True},
    ),
    (
        "-N 1 -n 8 --exclusive --gres=gpu:1",
        {"max_gpus": 8, "max_nodes": 1, "scale_unit": WHOLE},
        {"tasks": 1, "gpus": 1, "whole_nodes": True},
    ),
    (
        "-N 1 --ntasks-per-node=4 --exclusive",
        {"min_gpus": 2, "max_gpus": 8, "max_nodes": 1, "scale_unit": WHOLE, "gpus_per_task": 2},
        {"tasks": 1, "gpus": 2, "whole_nodes": True},
    ),
    ("--nodes=1 --gres=gpu:2 --mem-per-cpu=100M", {"max_gpus": 2, "max_nodes": 1}, {}),
    (  # only nodes that the job may have say how large a whole node is
        "-N 1 --ntasks-per-node=2 --exclusive --nodelist=t4-00",
        {"min_gpus": 2, "max_gpus": 4, "max_nodes": 1, "scale_unit": {"t4": 4}, "gpus_per_task": 2},
        {"tasks": 1, "gpus": 2, "whole_nodes": True},
    ),
    ("-N 1 --exclusive", {"max_gpus": 8, "max_nodes": 1, "scale_unit": WHOLE}, {"whole_nodes": True}),
    ("--ntasks=8 --ntasks-per-gpu=2", {"max_gpus": 4, "max_nodes": 4}, {"tasks": 2, "gpus": 1}),
    (
        "--nodes=1 --ntasks-per-node=2 --gres=gpu:8",
        {"min_gpus": 4, "max_gpus": 8, "max_nodes": 1, "gpus_per_task": 4},
        {"tasks": 1, "gpus": 4},
    ),
    ("--gres=gpu:4 --min-gpus=2 --max-gpus=8 --gpu-types=rtx", {"min_gpus": 2, "max_gpus": 8, "gpu_types": ["rtx"]}, {}),
    ("--nodes=1 --gres=gpu:4 --max-gpus=8", {"max_gpus": 8, "max_nodes": 1}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("header", "spec", "note"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_request_is_the_most_that_the_job_gets(
    flags: FlagSite, header: str, spec: dict[str, object], note: dict[str, object]
) -> None:
    done = flags.sbatch("--adaptive", *header.split())
    assert done.returncode == 0, done.stderr
    job = flags.job(done.stdout.strip())
    assert parse_spec(job.admin_comment) == JobSpec.model_validate(spec)
    assert json.loads(job.admin_comment).get("penstock_request", {}) == note
    assert job.held
    assert job.gpu_type is None


def test_salloc_gets_as_many_gpus_as_it_asks_for(flags: FlagSite) -> None:
    """What it writes into the user's shell would be wrong for another number."""
    flags.run("timeout", "3", "salloc", "--adaptive", "--gres=gpu:2", "--non-preemptible", "--job-name=shell", "true")
    (job,) = (each for each in flags.gateway.jobs(finished=True) if each.name == "shell")
    spec = parse_spec(job.admin_comment)
    assert spec == JobSpec(min_gpus=2, max_gpus=2, max_nodes=1, preemptible=False)


def test_the_user_is_told_how_the_header_was_read(flags: FlagSite) -> None:
    header = "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --mem=16000"
    said = flags.sbatch("--adaptive", *header.split()).stderr
    read = "1 to 16 GPUs, on at most 2 nodes, in partition all or t4, one task for each GPU, 2000 MB for each GPU"
    assert f"the job can have {read}, with the time limit of its partition." in said
    assert "In flags, this is --min-gpus=1 --max-gpus=16; give others to change it" in said


def test_a_partition_that_penstock_does_not_manage_is_left_out(flags: FlagSite) -> None:
    done = flags.sbatch("--adaptive", "--gres=gpu:1", "--partition=rtx,t4")
    assert "the job runs in t4: Penstock does not manage partition rtx" in done.stderr
    assert flags.job(done.stdout.strip()).partition == ("t4",)


def test_a_partition_that_gives_whole_nodes_gives_them_to_adaptive_jobs_too(flags: FlagSite) -> None:
    flags.slurm.command("scontrol", "update", "PartitionName=t4", "OverSubscribe=EXCLUSIVE")
    try:
        done = flags.sbatch("--adaptive", "--gres=gpu:1", "--partition=t4")
        said = flags.refusal("--adaptive", "--max-gpus=2", "--partition=t4")
        elsewhere = flags.submit("--adaptive", "--max-gpus=2")
    finally:
        flags.slurm.command("scontrol", "update", "PartitionName=t4", "OverSubscribe=NO")
    comment = flags.job(done.stdout.strip()).admin_comment
    assert parse_spec(comment) == JobSpec(max_gpus=8, max_nodes=1, scale_unit=WHOLE)
    assert json.loads(comment)["penstock_request"] == {"whole_nodes": True}
    assert "no partition has 1 to 2 GPUs of the kind that the flags ask for on whole nodes; there are" in said
    assert (elsewhere.partition, "penstock_request" in elsewhere.admin_comment) == (("all",), False)


def test_a_job_without_a_partition_has_whole_nodes_where_slurms_default_partition_gives_them(flags: FlagSite) -> None:
    """It got GPUs of other partitions only, and waited for them while nodes of the default partition were idle."""
    flags.slurm.command("scontrol", "update", "PartitionName=t4", "OverSubscribe=EXCLUSIVE", "Default=YES")
    try:
        done = flags.sbatch("--adaptive", "--gres=gpu:1")
    finally:
        flags.slurm.command("scontrol", "update", "PartitionName=t4", "OverSubscribe=NO")
        flags.slurm.command("scontrol", "update", "PartitionName=all", "Default=YES")
    job = flags.job(done.stdout.strip())
    assert (job.partition, json.loads(job.admin_comment)["penstock_request"]) == (("t4",), {"whole_nodes": True})


def test_all_reasons_against_a_header_are_told_at_once(flags: FlagSite) -> None:
    said = flags.refusal(
        *(
            "--adaptive",
            "--gres=gpu:a100:1,gpu:t4:2",
            "--no-requeue",
            "--hold",
            "--partition=rtx",
            "--ntasks-per-core=2",
        )
    )
    for words in (
        "--gres=gpu:a100:1,gpu:t4:2: give one number of GPUs, of one type at most, such as --gres=gpu:a100:4",
        "--ntasks-per-core above 1 cannot be used with --adaptive; give --ntasks-per-node",
        "--no-requeue cannot be used with --adaptive",
        "--hold cannot be used with --adaptive",
        "Penstock does not manage partition rtx",
    ):
        assert words in said, said


def test_all_reasons_against_flags_are_told_at_once(flags: FlagSite) -> None:
    said = flags.refusal(
        *("--adaptive", "--min-gpus=9", "--max-gpus=4", "--gpu-types=h800", "--model-family=x", "--batch-size=8"),
        *("--max-batch-size=4", "--nodelist=nix"),
    )
    for words in (
        "--min-gpus=9 is more than --max-gpus=4",
        "--gpu-types: there are no GPUs of type h800",
        "--model-family=x is not in the catalogue",
        "--max-batch-size=4 is less than --batch-size=8",
        "--nodelist: Penstock manages no GPUs of a node nix",
    ):
        assert words in said, said


@pytest.mark.parametrize(
    "asks",
    ["--cpus-per-task=500", "--mem=9000000", "--mem-per-cpu=200G --cpus-per-task=8", "--tmp=200G", "--cpus-per-gpu=65"],
)
def test_what_no_node_can_ever_run_is_refused_as_by_slurm(flags: FlagSite, asks: str) -> None:
    """Slurm checks a job only if it may start at once. It takes an adaptive job, which waits for a round, unseen."""
    said = flags.refusal("--adaptive", "--gres=gpu:1", *asks.split())
    assert "no node could ever run the job: with 1 GPU on a node it needs" in said
    assert flags.sbatch("--adaptive", "--gres=gpu:1", "--cpus-per-task=4", "--mem=1000").returncode == 0


def test_a_request_that_follows_the_gpus_is_judged_with_the_fewest(flags: FlagSite) -> None:
    """16 CPUs for each of eight GPUs are more than a node has; for the one GPU that the job can start with they are not."""
    header = ("--nodes=1", "--gpus-per-node=8", "--ntasks-per-node=8", "--cpus-per-task=16")
    assert flags.sbatch("--adaptive", *header).returncode == 0
    assert "it needs 128 CPUs" in flags.refusal("--adaptive", "--min-gpus=8", *header)


def test_the_limits_of_a_partition_count(flags: FlagSite) -> None:
    flags.slurm.command("scontrol", "update", "PartitionName=t4", "MaxCPUsPerNode=4")
    try:
        assert flags.penstock("sync").exit_code == 0
        said = flags.refusal("--adaptive", "--gres=gpu:1", "--cpus-per-task=8", "--partition=t4")
        elsewhere = flags.job(flags.sbatch("--adaptive", "--gres=gpu:1", "--cpus-per-task=8").stdout.strip())
    finally:
        flags.slurm.command("scontrol", "update", "PartitionName=t4", "MaxCPUsPerNode=UNLIMITED")
        assert flags.penstock("sync").exit_code == 0
    assert "no node could ever run the job" in said
    assert elsewhere.partition == ("all",)
