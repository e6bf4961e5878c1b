"""Every flag through the real sbatch, with good and bad values: the job, and the messages to its user."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import JobSpec, parse_spec, validate_spec
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.gateway.hostlist import expand
from tests.slurm_plugin.flags import values
from tests.slurm_plugin.flags.site import FlagSite

pytestmark = pytest.mark.slurm

ADAPTIVE = ("--adaptive", "--max-gpus=8")


def test_help_shows_every_flag_among_the_plugins_and_none_is_slurms_own(flags: FlagSite) -> None:
    for command in ("sbatch", "salloc", "srun"):
        own, _, plugins = flags.run(command, "--help").stdout.partition("Options provided by plugins:")
        for flag in values.FORMS:
            assert f"--{flag}" in plugins
            assert not re.search(rf"--{flag}\b(?!-)", own), f"{command} has an option --{flag} already"


def test_a_job_with_flags_is_kept_for_the_daemon(flags: FlagSite) -> None:
    job = flags.submit("--adaptive", "--min-gpus=2", "--max-gpus=8")
    spool = '"penstock_spool":"/var/spool/penstock"'
    assert job.admin_comment == f'{{"penstock":{{"adaptivity":"adaptive","min_gpus":2,"max_gpus":8}},{spool}}}'
    assert (job.held, job.requeue) == (True, True)
    assert (job.gpus_per_node, job.gpu_type, job.node_count) == (2, None, 1)
    assert job.partition == ("all",)


def test_a_job_without_flags_is_not_touched(flags: FlagSite) -> None:
    job = flags.submit("--gres=gpu:t4:1", "--no-requeue", "--partition=rtx", "--hold", "--comment=mine")
    assert (job.admin_comment, job.comment, job.partition) == ("", "mine", ("rtx",))
    assert (job.gpu_type, job.requeue) == ("t4", False)


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (("--adaptive=adaptive",), {"adaptivity": "adaptive"}),
        (("--adaptive=strong-scaling",), {"adaptivity": "strong-scaling"}),
        (("--adaptive=rigid",), {"adaptivity": "rigid", "min_gpus": 8}),
        (("--min-gpus=8",), {"min_gpus": 8}),
        (("--gpu-types=rtx,a100",), {"gpu_types": ["rtx", "a100"]}),
        (("--gpu-types=^t4,^rtx",), {"excluded_gpu_types": ["t4", "rtx"]}),
        (("--batch-size=256",), {"batch_size": 256}),
        (("--max-batch-size=4096",), {"max_batch_size": 4096}),
        (("--scale-unit=4",), {"scale_unit": 4}),
        (("--scale-unit=a100=2,rtx=8",), {"scale_unit": {"a100": 2, "rtx": 8}}),
        (("--model-family=bert-squad",), {"model_family": "bert-squad"}),
        (("--sensitivity=resnet18",), {"sensitivity": "resnet18"}),
        (("--gpu-class=guaranteed",), {"gpu_class": "guaranteed"}),
        (("--gpu-class=opportunistic",), {"gpu_class": "opportunistic"}),
        (("--non-preemptible",), {"preemptible": False}),
        (("--burst=never",), {"burst": "never"}),
        (("--burst=allowed",), {"burst": "allowed"}),
        (("--burst=allowed", "--burst-budget=12.50"), {"burst": "allowed", "burst_budget_usd": 12.5}),
        (("--data-size=500G",), {"data_size_bytes": 500 * 2**30}),
        (("--checkpoint-every=30",), {"checkpoint_every_s": 1800}),
        (("--grow-shrink",), {"grow_shrink": True}),
        (("--trial-group=lr-search",), {"trial_group": "lr-search"}),
        (("--runtime=1-12",), {"runtime_s": 129_600}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_each_flag_becomes_its_field(flags: FlagSite, argv: tuple[str, ...], fields: dict[str, object]) -> None:
    assert flags.spec(*ADAPTIVE, *argv) == JobSpec.model_validate({"max_gpus": 8} | fields)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            "--adaptive=elastic",
            "--adaptive=elastic: give adaptive, strong-scaling or rigid, such as --adaptive=strong-scaling",
        ),
        ("--min-gpus=0", "--min-gpus=0: give a whole number from 1 to 999999999, such as --min-gpus=2"),
        ("--max-gpus=zero", "--max-gpus=zero: give a whole number from 1 to 999999999, such as --max-gpus=8"),
        ("--max-gpus=-1", "--max-gpus=-1: give a whole number"),
        ("--max-gpus=8 ", "--max-gpus=8 : give a whole number"),
        ("--gpu-types=!t4", "--gpu-types=!t4: give GPU types such as a100,t4, or ^t4 for all but t4, such as"),
        ("--gpu-types=a100,^t4", "--gpu-types=a100,^t4: give GPU types"),
        ("--batch-size=1.5", "--batch-size=1.5: give a whole number"),
        ("--max-batch-size=", "--max-batch-size=: give a whole number"),
        ("--scale-unit=a100:2", "give a whole number, or one for each type, such as --scale-unit=a100=2,rtx=8"),
        (
            "--model-family=my model",
            "give a name of at most 64 letters, digits and ._+-, such as --model-family=bert-squad",
        ),
        ("--gpu-class=best", "give guaranteed or opportunistic, such as --gpu-class=opportunistic"),
        ("--burst=maybe", "give never, allowed or only, such as --burst=allowed"),
        ("--burst-budget=$5", "give dollars, with or without cents, such as --burst-budget=12.50"),
        ("--burst-budget=0", "--burst-budget=0: give dollars"),
        ("--data-size=500", "give a whole number and K, M, G or T, such as --data-size=500G"),
        (
            "--checkpoint-every=half an hour",
            "give a time as --time takes it: minutes, hours:minutes:seconds or days-hours",
        ),
        ("--trial-group=a/b", "--trial-group=a/b: give a name"),
        ("--runtime=1-24", "--runtime=1-24: give a time as --time takes it"),
        ("--trial-group=\x1b[2Jé", "penstock: --trial-group=?[2J??: give a name"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_sent(flags: FlagSite, argv: str, words: str) -> None:
    said = flags.refusal("--adaptive", "--max-gpus=8", argv)
    assert "sbatch: error: penstock: " in said
    assert words in said
    assert "Batch job submission failed" not in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--max-gpus=8",), "--max-gpus needs --adaptive"),
        (("--adaptive",), "--adaptive needs the most GPUs that the job can use, such as --max-gpus=8"),
        ((*ADAPTIVE, "--min-gpus=9"), "--min-gpus=9 is more than --max-gpus=8: lower it, or raise --max-gpus"),
        ((*ADAPTIVE, "--gpu-types=h100"), "there are no GPUs of type h100 here; the types are a100, rtx, t4"),
        (
            (*ADAPTIVE, "--model-family=gpt"),
            "--model-family=gpt is not in the catalogue; the families are bert-squad",
        ),
        ((*ADAPTIVE, "--partition=rtx"), "Penstock does not manage partition rtx; it manages all, t4"),
        ((*ADAPTIVE, "--partition=rtx,a100"), "does not manage partition rtx"),
        (
            ("--adaptive", "--min-gpus=17", "--max-gpus=20"),
            "no partition has 17 to 20 GPUs of the kind that the flags ask for",
        ),
        ((*ADAPTIVE, "--gpu-types=a100", "--partition=t4"), "there are all: 2 nodes with up to 8 a100; all: 2 nodes"),
        ((*ADAPTIVE, "--gres=gpu:a100:1,gpu:t4:1"), "give one number of GPUs, of one type at most"),
        ((*ADAPTIVE, "--gres=gpu:h100:1"), "--gpu-types: there are no GPUs of type h100 here"),
        (("--adaptive", "--nodes=1", "--gres=gpu:8", "--min-gpus=9"), "--min-gpus=9 is more than --max-gpus=8"),
        (
            ("--adaptive", "--nodes=1", "--min-gpus=9", "--max-gpus=16"),
            "no partition has 9 to 16 GPUs of the kind that the flags ask for on at most 1 node; there are",
        ),
        (
            ("--adaptive", "--ntasks=1", "--gpus-per-task=3", "--max-gpus=2"),
            "no GPU count from 2 to 2 is a multiple of the 3 GPUs of a task: make --max-gpus a multiple of it",
        ),
        ((*ADAPTIVE, "--nodelist=t4-07"), "--nodelist: Penstock manages no GPUs of a node t4-07"),
        (
            (*ADAPTIVE, "--gpu-types=a100", "--exclude=a100-[00-01]"),
            "no partition has 1 to 8 GPUs of the kind that the flags ask for on the nodes that --nodelist, --exclude and",
        ),
        (
            (*ADAPTIVE, "--constraint=[t4|rtx]"),
            "--constraint=[t4|rtx] cannot be used with --adaptive: join features by",
        ),
        ((*ADAPTIVE, "--constraint=t4&x|rtx"), "join features by & or by |, such as --constraint='a&b'"),
        (
            (*ADAPTIVE, "--ntasks=4"),
            "--ntasks=4 without a number of GPUs: give that, such as --gpus-per-task=1, or --ntasks-per-node instead",
        ),
        (
            (*ADAPTIVE, "--ntasks-per-node=9"),
            "--ntasks-per-node=9 with --adaptive means one task for each GPU, but --max-gpus=8: give at most that",
        ),
        ((*ADAPTIVE, "--ntasks-per-socket=2"), "--ntasks-per-socket cannot be used with --adaptive; give --ntasks"),
        ((*ADAPTIVE, "--burst=only"), "--burst=only: this site has no cloud: leave it out, or ask an admin"),
        ((*ADAPTIVE, "--exclusive", "--scale-unit=2"), "--scale-unit cannot be used where jobs have whole nodes"),
        (
            (*ADAPTIVE, "--no-requeue"),
            "--no-requeue cannot be used with --adaptive: Penstock moves jobs by requeueing",
        ),
        (
            (*ADAPTIVE, "--hold"),
            "--hold cannot be used with --adaptive: submit the job, and then use penstock hold",
        ),
        ((*ADAPTIVE, "--reservation=a,b"), "--reservation with --adaptive: name one reservation, not several"),
        (
            (*ADAPTIVE, '--comment={"penstock": {"max_gpus": 2}}'),
            "--comment has a job spec, but with --adaptive the flags make",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_contradiction_is_refused_with_its_remedy(flags: FlagSite, argv: tuple[str, ...], words: str) -> None:
    said = flags.refusal(*argv)
    assert "penstock: " in said
    assert words in said


@pytest.mark.parametrize(
    ("argv", "note", "shape"),
    [
        (("--nodelist=t4-00,rtx-[00-01]",), {"nodelist": "t4-00,rtx-[00-01]"}, (1, 5)),
        (("--nodelist=t4-[00,01]",), {"nodelist": "t4-[00-01]"}, (2, 3)),
        (("--exclude=rtx-[00-01],a100-00",), {"exclude": "rtx-[00-01],a100-00"}, (1, 5)),
        (("--constraint=t4|rtx", "-x", "rtx-00"), {"constraint": "t4|rtx", "exclude": "rtx-00"}, (1, 5)),
        (("--constraint=t4",), {"constraint": "t4"}, (2, 3)),
        (("--constraint=[t4]",), {"constraint": "t4"}, (2, 3)),
        (("--constraint=t4,t4&t4,",), {"constraint": "t4&t4&t4"}, (2, 3)),  # Slurm reads a comma as &
    ],
)
def test_nodes_that_the_user_allows_are_noted_for_the_daemon(
    flags: FlagSite, argv: tuple[str, ...], note: dict[str, str], shape: tuple[int, int]
) -> None:
    """The shape in which Slurm could start the job counts only these nodes: 5 GPUs on one rtx or a100, or 2 x 3 t4."""
    job = flags.submit("--adaptive", "--min-gpus=5", "--max-gpus=8", *argv)
    assert json.loads(job.admin_comment).keys() == {"penstock", "penstock_nodes", "penstock_spool"}
    noted = json.loads(job.admin_comment)["penstock_nodes"]
    assert {name: set(expand(text)) for name, text in noted.items()} == {n: set(expand(t)) for n, t in note.items()}
    assert (job.node_count, job.gpus_per_node, job.required_nodes) == (*shape, ())


def test_a_partition_whose_max_time_is_too_short_is_not_chosen(flags: FlagSite) -> None:
    """`all` comes first in the settings."""
    flags.slurm.command("scontrol", "update", "PartitionName=all", "MaxTime=10")
    try:
        assert flags.submit("--adaptive", "--max-gpus=4", "--time=10").partition == ("all",)
        assert flags.submit("--adaptive", "--max-gpus=4", "--time=11").partition == ("t4",)
        flags.slurm.command("scontrol", "update", "PartitionName=t4", "MaxTime=10")
        said = flags.refusal("--adaptive", "--max-gpus=4", "--time=11")
        assert "--time is more than the MaxTime of every partition that Penstock manages and you may use" in said
    finally:
        for name in ("all", "t4"):
            flags.slurm.command("scontrol", "update", f"PartitionName={name}", "MaxTime=UNLIMITED")


def test_a_heterogeneous_job_is_refused(flags: FlagSite) -> None:
    done = flags.run("sbatch", *ADAPTIVE, "--wrap=true", ":", "--wrap=true")
    assert "a heterogeneous job cannot be used with --adaptive; its parts cannot be moved" in done.stderr
    assert done.returncode != 0


def test_an_array_and_a_begin_time_are_kept(flags: FlagSite) -> None:
    done = flags.sbatch(*ADAPTIVE, "--array=1-3")
    elements = [flags.job(f"{done.stdout.strip()}_{index}") for index in (1, 2, 3)]
    assert all(each.held and parse_spec(each.admin_comment) == JobSpec(max_gpus=8) for each in elements)
    before_s = time.time()
    job = flags.submit(*ADAPTIVE, "--begin=now+1hour")
    note = json.loads(job.admin_comment)
    assert note.keys() == {"penstock", "penstock_begin_s", "penstock_spool"}
    assert before_s + 3599 <= note["penstock_begin_s"] <= time.time() + 3601
    assert job.held


def test_lines_of_a_script_count_as_flags(flags: FlagSite) -> None:
    script = flags.folder / "train.sbatch"
    script.write_text("#!/bin/sh\n#SBATCH --adaptive\n#SBATCH --max-gpus=8\n#SBATCH --gpu-types=rtx,a100\ntrue\n")
    assert flags.spec(str(script)) == JobSpec(max_gpus=8, gpu_types=("rtx", "a100"))


def test_the_examples_of_the_pages_are_accepted(flags: FlagSite) -> None:
    docs = Path(__file__).parents[3] / "docs" / "user"
    (script,) = re.findall(r"```\n(#!/bin/bash\n#SBATCH --adaptive.*?)```", (docs / "jobs.md").read_text(), re.DOTALL)
    path = flags.folder / "adaptive.sbatch"
    path.write_text(script)
    spec = JobSpec(max_gpus=8, gpu_types=("a100", "rtx"), model_family="resnet50-imagenet")
    assert flags.spec(str(path)) == spec
    lines = re.findall(r"^sbatch (--adaptive\S* .*?) \w+\.sh", (docs / "flags.md").read_text(), re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        assert flags.submit(*line.replace("=64", "=16").split()).admin_comment


def test_the_environment_has_defaults_for_adaptive_jobs_only(flags: FlagSite) -> None:
    defaults = {"PENSTOCK_MAX_GPUS": "4", "PENSTOCK_GPU_TYPES": "t4", "PENSTOCK_NON_PREEMPTIBLE": "yes"}
    assert flags.submit("--hold", **defaults).admin_comment == ""
    assert flags.spec("--adaptive", **defaults) == JobSpec(max_gpus=4, gpu_types=("t4",), preemptible=False)
    assert flags.spec("--adaptive", "--max-gpus=2", **defaults).max_gpus == 2
    assert flags.spec(PENSTOCK_ADAPTIVE="strong-scaling", **defaults).adaptivity == "strong-scaling"
    said = flags.refusal("--adaptive", PENSTOCK_MAX_GPUS="many")
    assert "penstock: PENSTOCK_MAX_GPUS: --max-gpus=many: give a whole number" in said


def test_arguments_in_plugstack_are_the_sites_defaults(flags: FlagSite) -> None:
    elsewhere = flags.folder / "etc-of-another-host"
    elsewhere.mkdir(exist_ok=True)
    for path in flags.etc.iterdir():
        if path.suffix == ".conf":
            (elsewhere / path.name).write_text(path.read_text())
    line = (flags.etc / "plugstack.conf").read_text().strip()
    conf = {"SLURM_CONF": str(elsewhere / "slurm.conf")}

    (elsewhere / "plugstack.conf").write_text(f"{line} environment=ignore checkpoint-every=30 max-gpus=4\n")
    spec = flags.spec("--adaptive", "--max-gpus=2", PENSTOCK_GPU_TYPES="t4", PENSTOCK_ADAPTIVE="rigid", **conf)
    assert spec == JobSpec(max_gpus=2, checkpoint_every_s=1800)
    assert flags.submit("--hold", PENSTOCK_ADAPTIVE="rigid", **conf).admin_comment == ""

    (elsewhere / "plugstack.conf").write_text(f"{line} adaptive=rigid checkpoint=30\n")
    assert flags.submit("--hold", **conf).admin_comment == ""  # in silence
    done = flags.sbatch("--adaptive", "--max-gpus=2", **conf)
    assert done.returncode == 0
    assert (
        "plugstack.conf: adaptive=rigid: give environment=ignore, run_dir=/run/penstock, or a flag's default"
        in done.stderr
    )
    assert "plugstack.conf: checkpoint=30: give environment=ignore" in done.stderr


def test_one_task_on_each_node_may_be_said(flags: FlagSite) -> None:
    assert flags.spec(*ADAPTIVE, "--ntasks-per-node=1", "--cpus-per-task=4", "--mem=1000", "--time=60") == JobSpec(
        max_gpus=8
    )


def test_several_tasks_on_a_node_are_one_for_each_gpu(flags: FlagSite) -> None:
    """Until Penstock places the job, it has the tasks and CPUs of the shape in which Slurm could start it."""
    done = flags.sbatch("--adaptive", "--min-gpus=2", "--max-gpus=8", "--ntasks-per-node=4", "--cpus-per-task=3")
    assert "the job has one task for each of its GPUs, however many it has" in done.stderr
    job = flags.job(done.stdout.strip())
    assert (job.gpus_per_node, job.tasks, job.cpus) == (2, 2, 6)
    assert json.loads(job.admin_comment)["penstock_request"] == {"tasks": 1, "gpus": 1}
    said = flags.run("salloc", *ADAPTIVE, "--non-preemptible", "--ntasks-per-node=2", "true").stderr
    assert "in salloc, start one task a GPU with srun" in said


def test_without_the_plugin_on_a_node_srun_starts_no_wrong_number_of_tasks(flags: FlagSite) -> None:
    done = flags.sbatch("--adaptive", "--max-gpus=8", "--ntasks-per-node=4", script="srun echo started")
    job = done.stdout.strip()
    plugstack = flags.etc / "plugstack.conf"
    before = plugstack.read_text()
    plugstack.write_text("")
    try:
        flags.slurm.command("scontrol", "release", job)
        wait_for(lambda: "lacks-penstock.so" in flags.text(job), 120, "srun's error", details=lambda: flags.text(job))
        assert "started" not in flags.text(job)
    finally:
        plugstack.write_text(before)


def test_the_plainest_shape_that_fits_is_asked_for(flags: FlagSite) -> None:
    """The fewest nodes: 16 rtx are 2 x 8, 6 t4 are 2 x 3, with units of 4 they are 2 x 4."""

    def shape(*argv: str) -> tuple[int, int | None]:
        job = flags.submit("--adaptive", "--max-gpus=16", *argv)
        return job.node_count, job.gpus_per_node

    assert shape("--min-gpus=16") == (2, 8)
    assert shape("--min-gpus=6", "--gpu-types=t4") == (2, 3)
    assert shape("--min-gpus=6", "--gpu-types=t4", "--scale-unit=4") == (2, 4)
    assert shape("--min-gpus=3", "--gpu-types=t4,rtx", "--scale-unit=rtx=8") == (1, 3)
    assert shape("--min-gpus=5", "--gpu-types=^t4") == (1, 5)


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_salloc_and_srun_take_the_flags_of_jobs_that_stay(flags: FlagSite, command: str) -> None:
    said = flags.run(command, *ADAPTIVE, "true").stderr
    assert "a job of salloc or srun cannot be restarted: add --non-preemptible, or use sbatch" in said
    release = (
        "for i in $(seq 999); do j=$(squeue -h -n $0 -o %i); [ $j ] && break; sleep 0.1; done; scontrol release $j"
    )
    shell = f"({release}) & {command} --adaptive --max-gpus=2 --non-preemptible -J $0 sh -c 'echo ran $SLURM_JOB_ID'"
    done = flags.run("sh", "-c", shell, f"a-{command}")
    word, job_id = done.stdout.split()
    assert word == "ran", done.stderr
    assert parse_spec(flags.job(job_id).admin_comment) == JobSpec(max_gpus=2, preemptible=False)


def test_a_job_inside_an_adaptive_job_is_plain_unless_it_asks(flags: FlagSite) -> None:
    script = """
env | grep ^PENSTOCK_ | grep -v ^PENSTOCK_SPOOL= && echo leaked
sbatch --parsable --hold --output=/dev/null --wrap=true
sbatch --parsable --output=/dev/null --adaptive --max-gpus=2 --wrap=true
PENSTOCK_ADAPTIVE=rigid PENSTOCK_MAX_GPUS=3 sbatch --parsable --output=/dev/null --wrap=true
srun true && echo step runs
srun --adaptive --max-gpus=2 true || echo step refused
echo over
"""
    outer = flags.submit(
        *ADAPTIVE,
        "--gpu-types=t4",
        "--non-preemptible",
        script=script,
        PENSTOCK_TRIAL_GROUP="outer",
        PENSTOCK_BURST="never",
    )
    spec = parse_spec(outer.admin_comment)
    assert spec == JobSpec(max_gpus=8, gpu_types=("t4",), preemptible=False, trial_group="outer", burst="never")
    flags.run("scontrol", "release", outer.id)
    wait_for(lambda: "over" in flags.text(outer.id), 120, "the job to end", details=lambda: flags.text(outer.id))
    text = flags.text(outer.id)
    plain, asks, by_environment = (line for line in text.splitlines() if line.isdigit())
    assert "leaked" not in text
    assert flags.job(plain).admin_comment == ""
    assert parse_spec(flags.job(asks).admin_comment) == JobSpec(max_gpus=2)
    assert parse_spec(flags.job(by_environment).admin_comment) == JobSpec(adaptivity="rigid", min_gpus=3, max_gpus=3)
    assert "step runs" in text
    assert f"penstock: --adaptive is for submitting a job, but srun starts a step inside job {outer.id}" in text
    assert "step refused" in text


def test_without_the_plugin_on_a_node_all_jobs_run(flags: FlagSite) -> None:
    adaptive = flags.submit(*ADAPTIVE, script="echo ran")
    library = flags.folder / "lib" / "penstock.so"
    away = library.with_suffix(".away")
    library.rename(away)
    try:
        plain = flags.sbatch(script="srun echo ran").stdout.strip()
        flags.run("scontrol", "release", adaptive.id)
        for job_id in (plain, adaptive.id):
            wait_for(lambda job_id=job_id: flags.job(job_id).state == "COMPLETED", 120, f"job {job_id} to end")
            assert "ran" in flags.text(job_id)
    finally:
        away.rename(library)


def test_without_the_daemon_slurm_starts_a_job_at_its_begin_time(flags: FlagSite) -> None:
    flags.settings("plain_after_s = 3600")
    try:
        assert flags.penstock("sync").exit_code == 0
        script = "echo $SLURM_JOB_NODELIST $SLURM_GPUS_ON_NODE"
        job = flags.submit("--adaptive", "--min-gpus=3", "--max-gpus=4", "--gpu-types=t4", script=script)
        plain = {"partition": "all", "nodes": 1, "gpus_per_node": 3}
        assert json.loads(job.admin_comment)["penstock_plain"] == plain
        assert (job.state, job.reason, job.held) == ("PENDING", "BeginTime", False)
        flags.run("scontrol", "update", f"JobId={job.id}", "StartTime=now")  # the hour is over
        wait_for(lambda: flags.job(job.id).state == "COMPLETED", 120, "Slurm to start the job by itself")
        node, gpus = flags.text(job.id).split()
        assert node.startswith("t4")  # Slurm, which knows no types here, would take the first node, an a100
        assert gpus == "3"
    finally:
        flags.settings()
        assert flags.penstock("sync").exit_code == 0


def test_without_the_sites_list_adaptive_jobs_are_refused_and_others_run(flags: FlagSite) -> None:
    listing = flags.etc / "penstock_site.lua"
    text = listing.read_text()
    for broken in (None, "return {", "return 7", "error('x')"):
        listing.unlink() if broken is None else listing.write_text(broken)
        try:
            said = flags.refusal(*ADAPTIVE)
            assert "adaptive jobs cannot be submitted until the site's admin has fixed this" in said
            assert flags.submit("--hold").admin_comment == ""
        finally:
            listing.write_text(text)


@pytest.mark.parametrize(
    "argv", [(*ADAPTIVE, "--gpu-types=t4"), ("--help",), ("--hold",), ("--adaptive", "--max-gpus=zero")], ids=" ".join
)
def test_valgrind_finds_nothing_of_ours(flags: FlagSite, argv: tuple[str, ...]) -> None:
    """sbatch itself loses some memory, also the copies that it makes of the variables we set."""
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    tool = ("valgrind", "--leak-check=full", "--show-leak-kinds=all", "--keep-debuginfo=yes", "--track-origins=yes")
    wrap = ("--output=/dev/null", "--wrap=true")
    done = flags.run(*tool, "sbatch", *wrap, *argv, timeout_s=120, PENSTOCK_RUNTIME="10", PENSTOCK_BURST="bad")
    assert "ERROR SUMMARY" in done.stderr
    records = re.split(r"==\d+== \n", done.stderr)
    ours = [record for record in records if re.search(r"penstock\.(so|c)|flags\.c", record)]
    assert [record for record in ours if "spank_job_control_setenv" not in record] == []  # what sbatch keeps of ours
    assert "Invalid read" not in done.stderr
    assert "Invalid write" not in done.stderr


def test_fuzzed_flags_through_sbatch(flags: FlagSite) -> None:
    """No job is accepted with a job spec that differs from what was typed."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    accepted = 0
    for _ in range(120):
        case = {"adaptive": "adaptive", "max-gpus": "16"}
        for flag in rng.sample(sorted(values.FORMS), 2):
            case[flag] = values.fuzzed(flag, rng) if rng.random() < 0.5 else values.example(flag, rng)
        argv, fields, fine = [], {"min_gpus": 1}, True
        for flag, value in case.items():
            if "\0" in value:
                continue
            if flag in values.SWITCHES:
                value = "yes"
                argv.append(f"--{flag}")
            else:
                argv.append(f"--{flag}={value}")
            fine = fine and values.good(flag, value)
            fields |= values.fields(flag, value) if values.good(flag, value) else {}
        if fine and case["adaptive"] == "rigid" and "min-gpus" not in case:
            fields["min_gpus"] = fields["max_gpus"]
        about = f"{argv} (seed {seed})"
        done = flags.sbatch(*argv)
        if done.returncode != 0:
            assert "penstock: " in done.stderr or "Invalid" in done.stderr, f"{about}: {done.stderr}"
            continue
        accepted += 1
        assert fine, about
        try:
            expected = validate_spec(fields)
        except BadJobSpec as error:
            raise AssertionError(f"{about}: {error}") from None
        assert parse_spec(flags.job(done.stdout.strip()).admin_comment) == expected, about
    assert accepted > 10


def test_memory_for_each_gpu_is_refused_by_sbatch_itself(flags: FlagSite) -> None:
    """An adaptive job requests no GPUs of its own. docs/user/flags.md says to give --mem."""
    assert "did not request any GPU" in flags.refusal(*ADAPTIVE, "--mem-per-gpu=1000")
