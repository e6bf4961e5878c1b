"""Ordinary headers of public training scripts, with --adaptive added: Penstock accepts and starts what sbatch accepts.

headers.tsv has their options alone, facts about how people ask for GPUs. Numbers of nodes above 2, CPUs and memory are smaller
than in the scripts; a name of a GPU type, a feature or a node became one that this site has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_scheduler.model import parse_spec
from penstock_slurm.gateway import SlurmJob
from tests.reality.cluster import Configuration, Request
from tests.reality.differential import Differential, differences, running

pytestmark = pytest.mark.slurm

DATA = os.environ.get("PENSTOCK_TEST_DATA")

NODE = "CPUs=64 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=256000"

TYPES = {"t4": 4, "rtx": 8, "a100": 8}
"""GPUs of a node."""

SITE = Configuration(
    name="headers",
    shape="the nodes, partitions and features that the headers name",
    nodes={
        f"{name}-[00-01]": f"{NODE} TmpDisk=300000 Gres=gpu:{name}:{gpus},nvme:500 Feature={name},gpu,ss11,hbm80g"
        for name, gpus in TYPES.items()
    },
    gres=(
        *(
            f"NodeName={name}-[00-01] Name=gpu Type={name} File={{gpus}}/nvidia[0-{gpus - 1}]"
            for name, gpus in TYPES.items()
        ),
        *(f"NodeName={name}-[00-01] Name=nvme Count=500" for name in TYPES),
    ),
    partitions=(
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        *(f"PartitionName={name} Nodes=ALL MaxTime=INFINITE State=UP" for name in ("gpu", "short")),
        "PartitionName=cpu Nodes=t4-00 MaxTime=INFINITE State=UP",
    ),
    managed=("all", "gpu", "short"),
    settings={
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": "1000",
        "GresTypes": "gpu,nvme",
        "Licenses": "scratch:10",
    },
    cases=(),
)

READ_AS_MOST = (
    "--open-mode=append --nodes=2 --cpus-per-gpu=4 --gpus-per-node=8 --gpus-per-task=1 --time=24:00:00",
    "--time=00:30:00 --nodes=1 --ntasks-per-node=16 --ntasks=1 --cpus-per-task=16 --gpus=1 --mem=6g",
)
"""Slurm 22.05 refuses them here ("Requested node configuration is not available"). Penstock reads a shape that can run, and has
to start it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Differential]:
    with running(tmp_path_factory.mktemp("headers"), SITE) as differential:
        yield differential


def published() -> list[str]:
    """The headers of the public data, without the option of a plugin that this host lacks."""
    if DATA is None:
        return []
    lines = (Path(DATA) / "headers" / "headers.tsv").read_text().splitlines()
    return [line.split("\t")[1].replace(" --nvmps", "") for line in lines]


def found() -> list[tuple[str, str]]:
    """Source and options of the headers in headers.tsv."""
    lines = Path(__file__).with_name("headers.tsv").read_text().splitlines()
    return [(source, options) for line in lines if "\t" in line for source, options in [line.split("\t")]]


def headers() -> list[str]:
    """The options of all headers."""
    return [options for _, options in found()] + [options for options in published() if "hetjob" not in options]


def test_there_are_at_least_forty() -> None:
    assert len(set(headers())) >= 40


def test_every_header_is_accepted_unless_sbatch_itself_refuses_it(site: Differential) -> None:
    refused = {}
    for options in headers():
        request = Request(options)
        _, plainly = site.submit(request, "--hold")
        job, why = site.submit(request, "--adaptive")
        if why and not plainly:
            refused[options] = why
        elif job:
            spec = parse_spec(record(site, job).admin_comment)
            assert spec is not None
            assert spec.max_nodes is not None
            assert spec.max_gpus >= 1
    site.clean()
    assert refused == {}


@pytest.mark.long
def test_every_header_starts_that_plain_slurm_starts(site: Differential) -> None:
    """Each alone on the whole site; without dependencies, which Slurm checks for held jobs only once a minute."""
    plain = {options: site.plain([Request(options)]) for options in headers()}
    site.site.start()
    late = {}
    for options in headers():
        adaptive = site.adaptive([Request(options.replace("--dependency=singleton", ""))], plain[options])
        if options in READ_AS_MOST:
            late[options] = [str(each) for each in adaptive if not each.started]
            assert plain[options][0].refused, f"Slurm takes {options} now"
        else:
            late[options] = differences(plain[options], adaptive)
    behind = [line for found in late.values() for line in found]
    assert not behind, "\n".join([*behind, site.site.tail()])


def record(site: Differential, job: str) -> SlurmJob:
    """Slurm's record of a job, or of the first element of an array."""
    return next(each for each in site.site.gateway.jobs() if each.id.split("_")[0] == job)
