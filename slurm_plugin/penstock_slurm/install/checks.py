"""Checks whether Penstock is installed in this Slurm and works. The last checks submit test jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock_scheduler.model import JobSpec, parse_spec
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import duration
from penstock_slurm.gateway import CliGateway, JobGone, SlurmJob, SlurmNode, SlurmPartition
from penstock_slurm.gateway.node_states import node_facts
from penstock_slurm.gateway.parse import resume_timeout_s
from penstock_slurm.install.agents import some
from penstock_slurm.install.answers import Finding
from penstock_slurm.install.plan import InstallTarget, own_lua_lacks_ours, site_text
from penstock_slurm.install.units import source
from penstock_slurm.observe import boots

TEST_JOB = "penstock-check"


def check_files(site: InstallTarget) -> Iterator[Finding]:
    """Checks that submit no job. Raises PenstockError."""
    config = site.config
    conf = config["SLURM_CONF"]
    loaded = "lua" in config.get("JobSubmitPlugins", "").split(",")
    yield Finding("slurmctld uses job_submit.lua", "" if loaded else f"JobSubmitPlugins in {conf} lacks lua")
    for key in ("JobRequeue", "JobFileAppend"):
        yield Finding(f"{key}=1", "" if config.get(key) == "1" else f"set {key}=1 in {conf}")
    current = site.module.exists() and site.module.read_bytes() == (source("lua") / "penstock.lua").read_bytes()
    yield Finding("penstock.lua is of this version", "" if current else "run `penstock slurm install --apply`")
    called = site.job_submit.exists() and not own_lua_lacks_ours(site)
    remedy = f"add the lines that {source('lua') / 'job_submit.lua'} shows for a site that has its own"
    yield Finding("job_submit.lua calls penstock.lua", "" if called else remedy)
    synced = site.site_file.exists() and site.site_file.read_text() == site_text(site)
    yield Finding("penstock_site.lua knows the partitions", "" if synced else "run `penstock slurm sync`")
    flags = "--adaptive" in site.commands.run("sbatch", "--help").stdout
    yield Finding("sbatch has the flags", "" if flags else f"{site.plugstack} loads no penstock.so on this machine")


def check_power_saving(site: InstallTarget) -> Iterator[Finding]:
    """Checks that the nodes which Slurm's power saving powers down can be used. Raises PenstockError."""
    yield from judge_power_saving(site.config, *managed_nodes(site))


def managed_nodes(site: InstallTarget) -> tuple[list[SlurmNode], list[SlurmPartition]]:
    """The nodes of the managed partitions, as far as Slurm shows them, and these partitions. Raises PenstockError."""
    section = site.slurm
    gateway = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)
    managed = set(section.partitions)
    nodes = [node for node in gateway.nodes() if managed & set(node.partitions)]
    return nodes, [each for each in gateway.partitions() if each.name in managed]


def judge_power_saving(
    config: Mapping[str, str], nodes: Sequence[SlurmNode], partitions: Iterable[SlurmPartition]
) -> Iterator[Finding]:
    """Findings of `check_power_saving`; none where Slurm's power saving is off.

    Args:
        config: `scontrol show config`.
        nodes: nodes of the managed partitions, as far as Slurm shows them.
        partitions: the managed partitions.
    """
    timeout_s = resume_timeout_s(config)
    asleep = [node.name for node in nodes if node_facts(node.state).asleep]
    if timeout_s is None:
        if asleep:
            remedy = f"set ResumeProgram in {config['SLURM_CONF']}; until then, no job starts there"
            yield Finding(f"Slurm can wake its powered-down nodes ({some(asleep)})", remedy)
        return
    limit = f"{duration(timeout_s)} (ResumeTimeout)"
    yield Finding(
        f"{len(asleep)} of {len(nodes)} nodes are powered down; Slurm wakes each for a job within {limit}, and `penstock nodes` "
        "shows how long that takes"
    )
    for node in nodes:
        if (
            text := boots.note(node, timeout_s * boots.FIRST_SHARE, timeout_s)
            if not node_facts(node.state).may_start
            else ""
        ):
            what, _, remedy = text.partition("; ")
            yield Finding(f"node {node.name} {what}", remedy)
    shown = {node.name for node in nodes}
    hidden = [name for each in partitions for name in each.nodes if name not in shown]
    if hidden and "cloud" not in config.get("PrivateData", "").lower():
        remedy = (
            f"Slurm 22.05 hides powered-down nodes with State=CLOUD; set PrivateData=cloud in {config['SLURM_CONF']}"
        )
        yield Finding(f"Slurm shows all nodes of its partitions (it hides {some(hidden)})", remedy)


def check_jobs(site: InstallTarget, user: int | None) -> Iterator[Finding]:
    """Checks that submit jobs which never start, and cancel them. Raises PenstockError."""
    section = site.slurm
    gateway = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)
    adaptive = submit_test_job(site, user, "--adaptive", "--max-gpus=1", "--non-preemptible")
    if isinstance(adaptive, Finding):
        yield adaptive
    else:
        yield _adaptive_finding(gateway, adaptive, waits=section.plain_after_s is None)
    plain = submit_test_job(site, user, "--hold", f"--partition={section.partitions[0]}")
    if isinstance(plain, Finding):
        yield plain
    else:
        job = _take(gateway, plain)
        untouched = job is not None and not job.admin_comment
        yield Finding(f"a plain job ({plain}) is not changed", "" if untouched else f"it became {job}")
    bad = site.commands.run("sbatch", "--adaptive", "--max-gpus=none", "--wrap=true", user=user)
    refused = bad.returncode != 0 and "give a whole number" in bad.stderr
    yield Finding("a bad value is refused", "" if refused else f"sbatch --max-gpus=none printed {bad.stderr!r}")


def waiting_jobs(site: InstallTarget) -> list[SlurmJob]:
    """Pending jobs with a job spec in admin_comment."""
    section = site.slurm
    gateway = CliGateway(conf=section.conf, timeout_s=section.command_timeout_s)
    return [job for job in gateway.jobs() if job.state == "PENDING" and '"penstock"' in job.admin_comment]


def submit_test_job(site: InstallTarget, user: int | None, *flags: str, script: str = "true") -> str | Finding:
    """The id of a test job, or why it could not be submitted."""
    fixed = (f"--job-name={TEST_JOB}", "--parsable", "--output=/dev/null", "--time=1", f"--wrap={script}")
    done = site.commands.run("sbatch", *fixed, *flags, user=user)
    if done.returncode == 0:
        return done.stdout.strip().split(";")[0]
    what = f"sbatch {' '.join(flags)}"
    return Finding(what, f"{done.stderr.strip()}; --user NAME submits the test jobs as another user")


def _adaptive_finding(gateway: CliGateway, job_id: str, *, waits: bool) -> Finding:
    job = _take(gateway, job_id)
    what = f"a job with flags ({job_id}) gets its job spec"
    if job is None:
        return Finding(what, "the job disappeared at once")
    try:
        spec = parse_spec(job.admin_comment)
    except PenstockError as error:
        return Finding(what, str(error))
    if spec != JobSpec(max_gpus=1, preemptible=False):
        return Finding(what, f"its AdminComment is {json.dumps(job.admin_comment)}: does slurmctld use job_submit.lua?")
    if job.gpus_per_node != 1 or job.gpu_type is not None or not job.requeue:
        return Finding(what, f"it asks for {job.gpus_per_node} GPUs of type {job.gpu_type}, requeue={job.requeue}")
    held = job.held if waits else job.reason == "BeginTime" or job.held
    return Finding(what, "" if held else f"it is not held: {job.state}, {job.reason}")


def _take(gateway: CliGateway, job_id: str) -> SlurmJob | None:
    """Slurm's record of a test job, which is cancelled."""
    try:
        return next((job for job in gateway.jobs() if job.id == job_id), None)
    finally:
        with contextlib.suppress(JobGone):
            gateway.cancel(job_id)
