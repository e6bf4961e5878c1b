"""Checks whether Penstock knows what this Slurm answers: its version and clock, every record now, and two test jobs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock_slurm.gateway import CliGateway, JobGone, SlurmError, SlurmJob, Unknown, abilities
from penstock_slurm.gateway.abilities import Release, Version, shown, tested
from penstock_slurm.gateway.parse import parse_version
from penstock_slurm.install.plan import InstallTarget

SHOWN = 8
"""Most records that a finding names."""

CLOCK_S = 5.0
"""Most seconds by which the clocks of slurmctld and this host may differ."""

UPDATE = "use a version of Penstock that knows this Slurm, or report this line; until then Penstock leaves them alone"


def check_answers(site: InstallTarget) -> Iterator[Finding]:
    """Checks of Slurm's version, its clock, and all records that it has now. Submits no job."""
    gateway = _gateway(site)
    version = gateway.version()
    known = ", ".join(map(shown, abilities.TESTED))
    yield Finding(f"Slurm {shown(version)} {'is' if tested(version) else 'is not'} among the tested versions: {known}")
    controller = parse_version(site.config.get("SLURM_VERSION", shown(version)))
    remedy = f"slurmctld is Slurm {shown(controller)}; install the commands of the same release here"
    yield Finding("the commands have slurmctld's version", "" if controller == version else remedy)
    yield Finding("slurmctld's clock agrees with this host's", _clock(site))
    readings: tuple[tuple[str, Callable[[], Iterable[tuple[str, tuple[Unknown, ...]]]]], ...] = (
        ("partitions", lambda: [(each.name, each.unknown) for each in gateway.partitions()]),
        ("nodes", lambda: [(each.name, each.unknown) for each in gateway.nodes()]),
        ("jobs", lambda: [(each.id, each.unknown) for each in gateway.jobs(finished=True)]),
    )
    for kind, read in readings:
        try:
            records = list(read())
        except SlurmError as error:
            yield Finding(f"Slurm's answers about {kind} can be read", str(error))
            continue
        yield Finding(f"all that Slurm says of its {len(records)} {kind} is known", _remedy(kind, records))


def _clock(site: InstallTarget) -> str:
    """What is wrong with slurmctld's clock; empty if nothing is. penstockd compares Slurm's times with its own."""
    asked_s = time.time()
    said = site.commands.run("sdiag")
    found = re.search(r"^sdiag output at .*\((\d+)\)$", said.stdout, re.MULTILINE)
    if found is None:
        return f"sdiag does not say slurmctld's time: {(said.stderr or said.stdout).strip()[:200]}"
    ahead_s = int(found[1]) - asked_s
    if -CLOCK_S < ahead_s < CLOCK_S + time.time() - asked_s:
        return ""
    which = "ahead of" if ahead_s > 0 else "behind"
    return f"it is {abs(ahead_s):.0f} s {which} this host's; synchronise both, for example with chrony"


def _remedy(kind: str, records: Iterable[tuple[str, tuple[Unknown, ...]]]) -> str:
    """What is unknown, with the records that have it; empty if nothing is."""
    found: dict[str, list[str]] = {}
    for name, unknown in records:
        for each in unknown:
            found.setdefault(str(each), []).append(name)
    texts = [
        f"{text} of {kind} {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for text, names in found.items()
    ]
    return f"unknown: {'; '.join(texts)}: {UPDATE}" if texts else ""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What Penstock should read of a test job."""

    field: str
    """squeue's field."""
    read: Callable[[SlurmJob], object]
    value: object


def check_test_jobs(site: InstallTarget, submit: Callable[..., str | Finding]) -> Iterator[Finding]:
    """Submits an ordinary job and one with --exclusive, both held, compares what is read of them, and cancels them.

    Args:
        site: the Slurm.
        submit: submits a job with these flags of sbatch. Returns its id, or why it could not be submitted.
    """
    gateway = _gateway(site)
    version = gateway.version()
    release = abilities.release(version)
    for flags, whole_nodes in (((), False), (("--exclusive",), True)):
        job_id = submit("--hold", "--requeue", "--gres=gpu:1", f"--partition={site.slurm.partitions[0]}", *flags)
        if isinstance(job_id, Finding):
            yield job_id
            continue
        what = f"a held job {'with' if flags else 'without'} --exclusive ({job_id}) is read as one"
        try:
            yield Finding(what, _misread(site, gateway, job_id, release, version, whole_nodes=whole_nodes))
        finally:
            with contextlib.suppress(JobGone):
                gateway.cancel(job_id)


def _misread(
    site: InstallTarget, gateway: CliGateway, job_id: str, release: Release, version: Version, *, whole_nodes: bool
) -> str:
    """Which fields of a test job are read wrongly; empty: none."""
    job = next((job for job in gateway.jobs() if job.id == job_id), None)
    if job is None:
        return "squeue does not list it"
    wanted = (
        _Wanted("State", lambda job: job.state, "PENDING"),
        _Wanted("PriorityLong", lambda job: job.held, True),
        _Wanted("tres-per-node", lambda job: (job.gpus_per_node, job.gpu_type), (1, None)),
        _Wanted("Requeue", lambda job: job.requeue, True),
        _Wanted("RestartCnt", lambda job: job.restarts, 0),
        _Wanted("NodeList", lambda job: job.nodes, ()),
        _Wanted(release.whole_nodes_field, lambda job: job.exclusive, whole_nodes),
    )
    wrong = {each.field for each in wanted if each.read(job) != each.value} | {each.field for each in job.unknown}
    if not wrong:
        return ""
    said = [
        site.commands.run("squeue", "-h", "-j", job_id, "-O", f"{field}:0").stdout.strip() for field in sorted(wrong)
    ]
    texts = [f"{field}={text}" for field, text in zip(sorted(wrong), said, strict=True)]
    return f"Slurm {shown(version)} says {', '.join(texts)}, which Penstock takes for something else: {UPDATE}"


def _gateway(site: InstallTarget) -> CliGateway:
    return CliGateway(conf=site.slurm.conf, timeout_s=site.slurm.command_timeout_s)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `remedy` is empty if nothing is wrong."""

    what: str
    remedy: str = ""
