"""A host with GPUs of several types on a real Slurm: jobs move between its types, and none ever has a mixture."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import DrainOrder
from tests.reality.cluster import NODE, Configuration
from tests.reality.differential import Differential, running

pytestmark = pytest.mark.slurm

LAB = Configuration(
    name="lab",
    shape="a host with GPUs of two types, and a host with one of these types",
    nodes={"lab1": f"{NODE} Gres=gpu:gtx1060:2,gpu:gtx970:2", "old1": f"{NODE} Gres=gpu:gtx1060:4"},
    gres=(
        "NodeName=lab1 Name=gpu Type=gtx1060 File={gpus}/nvidia[0-1]",
        "NodeName=lab1 Name=gpu Type=gtx970 File={gpus}/nvidia[2-3]",
        "NodeName=old1 Name=gpu Type=gtx1060 File={gpus}/nvidia[0-3]",
    ),
    partitions=("PartitionName=lab Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("lab",),
    cases=(),
)


@pytest.fixture
def lab(tmp_path) -> Iterator[Differential]:
    with running(tmp_path, LAB) as found:
        found.site.start()
        yield found


def test_a_job_moves_between_the_types_of_a_host_and_never_has_a_mixture(lab: Differential) -> None:
    spec = {"gpu_types": ["gtx970", "gtx1060"], "min_gpus": 2, "max_gpus": 2, "checkpointable": True}
    ours = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null", "--comment=" + json.dumps({"penstock": spec}))
    with Client(f"unix:{lab.site.state / 'api.sock'}") as admin:
        admin.drain(DrainOrder(kind="node", name="old1"))
        admin.drain(DrainOrder(kind="gpu-type", name="gtx1060"))
        job = lab.site.sbatch(*ours, "--wrap=sleep 3600")
        assert held(lab, job, "gtx970") == {"lab1[gtx970]"}
        admin.end_drain("gpu-type", "gtx1060")
        admin.drain(DrainOrder(kind="gpu-type", name="gtx970"))
        assert held(lab, job, "gtx1060") == {"lab1[gtx1060]"}
        admin.end_drain("gpu-type", "gtx970")
        other = lab.site.sbatch(*ours, "--wrap=sleep 3600")
        assert held(lab, other, "gtx970") == {"lab1[gtx970]"}
        admin.end_drain("node", "old1")
        admin.drain(DrainOrder(kind="node", name="lab1", why="new GPUs"))
        release = lab.site.slurm.command("sinfo", "--version").stdout
        if "22.05" in release:
            # Slurm would not start a job there that has asked for the other type, so neither is stopped for it.
            first = lab.site.wait_round()
            lab.site.wait_round(after=first + 3)
            assert held(lab, job, "gtx1060") | held(lab, other, "gtx970") == {"lab1[gtx970]", "lab1[gtx1060]"}
        else:
            assert held(lab, job, "gtx1060", "old1") == held(lab, other, "gtx1060", "old1") == {"old1"}


def held(lab: Differential, job: str, gpu_type: str, host: str = "lab1") -> set[str]:
    """The nodes on which penstockd sees the job, once Slurm has started it there with two GPUs of one type, the given one."""

    def there() -> str:
        shown = lab.site.slurm.command("scontrol", "show", "job", "-d", job).stdout
        lines = [line.strip() for line in shown.splitlines() if "IDX:" in line]
        runs = len(lines) == 1 and "JobState=RUNNING" in shown and f"Nodes={host} " in lines[0]
        return lines[0] if runs and gpu_type in lines[0] and f"{gpu_type}:0" not in lines[0] else ""

    def details() -> str:
        return lab.site.slurm.command("scontrol", "show", "job", "-d", job).stdout + lab.site.tail()

    line = wait_for(there, 120, f"job {job} to have {gpu_type} on {host}", details=details)
    gres = line.split("GRES=")[1].replace("),", ") ").split()
    counts = [int(each.split("(")[0].split(":")[2]) for each in gres]
    assert sorted(counts, reverse=True)[0] == 2, line
    assert sum(counts) == 2, f"a mixture: {line}"
    with Client(f"unix:{lab.site.state / 'api.sock'}") as penstock:

        def seen() -> set[str]:
            (found,) = (each for each in penstock.jobs() if each.id == job)
            allocation = found.allocation
            fits = found.state == "running" and allocation is not None and gpu_type in allocation.gpu_type
            return set(allocation.nodes) if fits and allocation is not None else set()

        return wait_for(seen, 60, f"penstockd to see job {job} there")
