"""A job submitted with sbatch's adaptive flags runs under a real penstockd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import parse_spec
from penstock_slurm.gateway import SlurmJob
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm


def test_a_job_with_flags_is_placed_within_its_spec_and_completes(flag_site: Site) -> None:
    job = flag_site.submit_with_flags(60, "--min-gpus=2", "--max-gpus=4", "--gpu-types=^t4", "--non-preemptible")
    flag_site.wait_completed(job)
    starts = flag_site.starts(job)
    assert starts
    assert {(gpu_type, gpus) for gpu_type, gpus, _ in starts} <= {("a100", 2), ("a100", 4)}


def test_what_the_daemon_says_stands_beside_the_spec(flag_site: Site) -> None:
    """The list for job_submit.lua is older than the daemon's catalogue, and has a family that was removed."""
    job = flag_site.sbatch("--adaptive", "--max-gpus=4", "--model-family=gone", "--wrap=true")
    before = parse_spec(flag_site.job(job).admin_comment)

    def told() -> bool:
        return "penstock_says" in flag_site.job(job).admin_comment

    wait_for(told, 120, "the daemon's message", details=flag_site.tail)
    after = flag_site.job(job).admin_comment
    assert "'gone'" in json.loads(after)["penstock_says"]
    assert parse_spec(after) == before
    number = flag_site.wait_round()
    flag_site.wait_round(number)
    assert flag_site.job(job).admin_comment == after  # and the message is not repeated
    assert flag_site.states(job) == {job: "PENDING"}


@pytest.mark.parametrize("options", [(), ("--export=NONE",), ("--array=3",), ("--export=PENSTOCK_SPOOL=",)], ids=str)
def test_a_job_finds_the_spool_without_any_word_of_its_user(flag_site: Site, options: tuple[str, ...]) -> None:
    """A site that was set up by its pages: nobody has exported a variable."""
    said = flag_site.spool.parent / "said"
    words = ("--adaptive", "--max-gpus=1", "--output=/dev/null", *options, f"--wrap=printenv PENSTOCK_SPOOL >{said}")
    job = flag_site.slurm.command("sbatch", "--parsable", *words).stdout.strip()
    wait_for(said.exists, 120, f"job {job} to say what it has", details=flag_site.tail)
    wait_for(lambda: said.read_text().strip() == str(flag_site.spool), 20, "the spool")


def test_a_requeued_job_and_its_steps_find_the_spool(flag_site: Site) -> None:
    said = flag_site.spool.parent / "said"
    script = f"srun printenv PENSTOCK_SPOOL >{said}$SLURM_RESTART_COUNT; sleep 600"
    words = ("--adaptive", "--max-gpus=1", "--output=/dev/null", f"--wrap={script}")
    job = flag_site.slurm.command("sbatch", "--parsable", *words).stdout.strip()
    for restarts in ("", "1"):
        path = said.with_name(f"said{restarts}")
        wait_for(lambda path=path: path.exists() and path.read_text(), 120, f"{path}", details=flag_site.tail)
        assert path.read_text().strip() == str(flag_site.spool)
        flag_site.slurm.command("scontrol", "requeue", job, check=not restarts)
    flag_site.slurm.command("scancel", job)


SIZES = {"t4": (1, 2), "rtx": (1, 4), "v100": (2, 2), "a100": (1, 1)}
"""Nodes of each GPU type, and the GPUs of one: moves along these types go from 2 GPUs to 4, to 4 on two nodes, and to 1."""


@pytest.fixture
def sizes_site(make_flag_site: Callable[..., Site]) -> Site:
    """A site with a node, or a pair of nodes, for each of the sizes."""
    site = make_flag_site(",".join(f"{name}:{nodes}x{gpus}" for name, (nodes, gpus) in SIZES.items()))
    site.start()
    return site


def allow_only(site: Site, gpu_type: str) -> None:
    """Drain all nodes but those of one GPU type."""
    for name, (nodes, _) in SIZES.items():
        hosts = ",".join(f"{name}-{index:02}" for index in range(nodes))
        state = ("State=RESUME",) if name == gpu_type else ("State=DRAIN", "Reason=test")
        site.slurm.command("scontrol", "update", f"NodeName={hosts}", *state, check=False)  # an idle node has no RESUME


def walk(site: Site, *flags: str, script: str = "") -> Iterator[SlurmJob]:
    """Submit a job and move it along `SIZES`. Yields Slurm's record of it once it runs there with all GPUs."""
    allow_only(site, next(iter(SIZES)))
    units = ",".join(f"{name}={nodes * gpus}" for name, (nodes, gpus) in SIZES.items())  # all GPUs, or none
    flags = ("--max-gpus=4", f"--scale-unit={units}", f"--output={site.folder}/%j.out", *flags)
    wrap = f"--wrap={script}{site.trainer(10_000, RATES | {'v100': RATES['a100']})}"
    job = site.sbatch("--adaptive", "--checkpointable", "--open-mode=append", *flags, wrap)
    for gpu_type, size in SIZES.items():
        allow_only(site, gpu_type)

        def there(gpu_type: str = gpu_type, size: tuple[int, int] = size) -> bool:
            now, gpus = site.job(job), size[0] * size[1]
            on = {node.split("-")[0] for node in now.nodes}
            runs = [(name, count) for name, count, _ in site.starts(job)][-1:] == [(gpu_type, gpus)]
            return runs and now.state == "RUNNING" and on == {gpu_type}

        wait_for(there, 180, f"the job to run on all {gpu_type}", details=site.tail)
        yield site.job(job)


def test_a_job_has_its_cpus_for_each_gpu_at_every_size(sizes_site: Site) -> None:
    """Slurm multiplies --cpus-per-gpu by the GPUs at the first start only. Newer sbatch refuses it without --gpus."""
    if sizes_site.gateway.version() >= (24, 11):
        with pytest.raises(AssertionError, match="did not request any GPU"):
            next(walk(sizes_site, "--cpus-per-gpu=3"))
        return
    assert [job.cpus for job in walk(sizes_site, "--cpus-per-gpu=3")] == [6, 12, 12, 3]


def test_a_plain_srun_starts_one_task_for_each_gpu_at_every_size(sizes_site: Site) -> None:
    """As scripts launch that say --ntasks-per-node: the numbers of the submission are right for the first size only."""
    said = "$SLURM_NTASKS $SLURM_NPROCS $SLURM_NTASKS_PER_NODE"
    script = f"echo batch {said}; srun sh -c 'echo task $SLURM_PROCID of {said} on $SLURMD_NODENAME'; "
    jobs = list(walk(sizes_site, "--ntasks-per-node=2", "--cpus-per-task=3", script=script))
    assert [job.cpus for job in jobs] == [6, 12, 12, 3]
    lines = (sizes_site.folder / f"{jobs[0].id}.out").read_text().splitlines()
    assert [line for line in lines if line.startswith("batch")] == [
        "batch 2 2 2",
        "batch 4 4 4",
        "batch 4 4 2",
        "batch 1 1 1",
    ]
    runs = "\n".join(lines).split("batch ")[1:]
    for run, (nodes, gpus), gpu_type in zip(runs, SIZES.values(), SIZES, strict=True):
        tasks = sorted(line.split(maxsplit=1)[1] for line in run.splitlines() if line.startswith("task"))
        assert tasks == [
            f"{task} of {nodes * gpus} {nodes * gpus} {gpus} on {gpu_type}-{task // gpus:02}"
            for task in range(nodes * gpus)
        ]


def test_a_header_keeps_its_cpus_and_memory_for_each_gpu_at_every_size(sizes_site: Site) -> None:
    """And a script finds the numbers of its run where sbatch wrote those of the header."""
    names = ("NTASKS", "GPUS_PER_NODE", "CPUS_PER_TASK", "MEM_PER_NODE")
    script = f"echo batch {' '.join(f'$SLURM_{name}' for name in names)}; srun sh -c 'echo task $SLURM_PROCID'; "
    header = ("--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--mem=400")
    jobs = list(walk(sizes_site, *header, script=script))
    assert [job.cpus for job in jobs] == [4, 8, 8, 2]
    lines = (sizes_site.folder / f"{jobs[0].id}.out").read_text().splitlines()
    assert [line for line in lines if line.startswith("batch")] == [
        "batch 1 2 4 400",
        "batch 1 4 8 800",
        "batch 2 2 4 400",
        "batch 1 1 2 200",
    ]
    assert sum(line.startswith("task") for line in lines) == 5


def test_a_task_of_two_gpus_keeps_them_and_a_job_never_gets_more_nodes_than_its_header_names(flag_site: Site) -> None:
    """One job after the other, each on whatever the policy gives it."""
    said = "--wrap=srun sh -c 'echo $SLURM_NNODES $SLURM_NTASKS $SLURM_GPUS_PER_TASK; sleep 1'"
    for header in (
        ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=2"),
        ("--nodes=1", "--gpus-per-node=2", "--exclusive"),
    ):
        job = flag_site.sbatch("--adaptive", *header, f"--output={flag_site.folder}/%j.out", said)
        flag_site.wait_states("COMPLETED", job)
        text = (flag_site.folder / f"{job}.out").read_text().split("\n")
        nodes, tasks, *each = text[0].split()
        assert int(nodes) <= int(header[0].removeprefix("--nodes="))
        assert int(tasks) >= 1
        assert each in ([], ["2"])


def test_a_job_that_requeues_itself_has_its_whole_limit_each_time(flag_site: Site) -> None:
    """As submitit, Lightning and many sites' recipes do shortly before the limit."""
    out = flag_site.folder / "limits.out"
    script = (
        f"squeue -h -j $SLURM_JOB_ID -o 'limit %l'; [ $(grep -c limit {out}) -ge 4 ] || "
        "{ sleep 1; scontrol requeue $SLURM_JOB_ID; sleep 600; }"
    )
    job = flag_site.sbatch(
        *("--adaptive", "--gres=gpu:1", "--time=3", "--open-mode=append", f"--output={out}", f"--wrap={script}")
    )
    flag_site.wait_states("COMPLETED", job, timeout_s=300)
    assert [line for line in out.read_text().splitlines() if line.startswith("limit")] == ["limit 3:00"] * 4
