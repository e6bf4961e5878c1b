"""Random sites and random requests: whatever plain Slurm starts, Penstock starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock_loopback.fixtures import skip_without_slurm
from tests.reality.cluster import Configuration, Request
from tests.reality.differential import differences, running

pytestmark = pytest.mark.slurm

EXAMPLES = int(os.environ.get("PENSTOCK_RANDOM_SITES", "15"))
"""Examples in one run: 15 in CI, 200 by hand."""

JOBS = 5
"""Requests in an example; each site runs so many."""

TIGHT = EXAMPLES > 15
"""Whether nodes have few CPUs and little memory, and jobs ask for much of them: by hand only."""

CORES = (8, 16, 32) if TIGHT else (32,)
MEMORY = (64_000, 256_000) if TIGHT else (256_000,)
LARGE = ("--mem=100G", "--mem=0", "-c 12") if TIGHT else ()

TYPES = ("a100", "v100", "t4")


@st.composite
def sites(draw: st.DrawFn) -> Configuration:
    """Two to four nodes of one to three types, in one to three partitions."""
    nodes, gres, types = {}, [], []
    for number in range(draw(st.integers(2, 4))):
        gpu_type, gpus = draw(st.sampled_from(TYPES)), draw(st.sampled_from((1, 2, 4, 8)))
        cores = draw(st.sampled_from(CORES))
        shape = f"CPUs={2 * cores} Boards=1 SocketsPerBoard=2 CoresPerSocket={cores} ThreadsPerCore=1"
        weight = draw(st.sampled_from((1, 10)))
        memory = draw(st.sampled_from(MEMORY))
        nodes[f"n{number}"] = (
            f"{shape} RealMemory={memory} Gres=gpu:{gpu_type}:{gpus} Feature={gpu_type},f{number % 2} Weight={weight}"
        )
        files = "nvidia0" if gpus == 1 else f"nvidia[0-{gpus - 1}]"
        gres.append(f"NodeName=n{number} Name=gpu Type={gpu_type} File={{gpus}}/{files}")
        types.append(gpu_type)
    names = sorted(nodes)
    part = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    rule = draw(st.sampled_from(("", " OverSubscribe=EXCLUSIVE", " MaxNodes=1", " LLN=YES", " PriorityTier=5")))
    memory_too = draw(st.booleans())
    return Configuration(
        name="random",
        shape="random",
        nodes=nodes,
        gres=tuple(gres),
        partitions=(
            "PartitionName=main Nodes=ALL Default=YES MaxTime=2-0 State=UP",
            f"PartitionName=part Nodes={','.join(sorted(part))} MaxTime=2-0 State=UP{rule}",
        ),
        managed=("main", "part"),
        cases=(),
        settings={"SelectTypeParameters": "CR_Core_Memory", "DefMemPerCPU": "1000"} if memory_too else {},
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request for GPUs, alone on the site."""
    gpus = draw(st.integers(1, 4))
    typed = draw(st.sampled_from(("", *(f"{each}:" for each in TYPES))))
    nodes = draw(st.sampled_from(("", "-N 1", "-N 2")))
    kind = draw(st.sampled_from(("--gres=gpu:", "--gpus-per-node=", "--gpus=", "--gpus-per-task=")))
    tasks = draw(st.sampled_from(("", "--ntasks-per-node=1", "--ntasks-per-node=2", "-n 2")))
    if kind == "--gpus-per-task=" and not tasks:
        tasks = "-n 1"
    more = (
        st.sampled_from(("", "-c 2", "--cpus-per-gpu=4")),
        st.sampled_from(("", "--mem=4G", "--mem-per-cpu=500M", "--mem-per-gpu=2G", *LARGE)),
        st.sampled_from(("", "", "-C f0", "-C f1", "-C 'a100|t4'", "-x n0", "-w n1")),
        st.sampled_from(("", "", "-p part", "-p main", "-p main,part")),
        st.sampled_from(("", "", "--exclusive", "--time=30", "--array=1-2", "--requeue", "--hint=nomultithread")),
    )
    words = [nodes, tasks, f"{kind}{typed}{gpus}", *(draw(each) for each in more)]
    return Request(" ".join(word for word in words if word))


@pytest.fixture(autouse=True)
def _slurm() -> None:
    skip_without_slurm(accounting=False)
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")


@given(site=sites(), jobs=st.lists(requests(), min_size=JOBS, max_size=JOBS))
@settings(
    max_examples=max(1, EXAMPLES // JOBS),
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_a_request_that_plain_slurm_starts_starts(site: Configuration, jobs: list[Request]) -> None:
    """One site runs five requests, one after the other; each is one example."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), site) as differential:
        plain = {job: differential.plain([job]) for job in jobs}
        differential.site.start()
        late = [found for job in plain for found in differences(plain[job], differential.adaptive([job], plain[job]))]
        # A request of more GPUs than there are is accepted: it is the most that the job can use.
        unforeseen = [found for found in late if not found.startswith("accepted")]
        assert not unforeseen, "\n".join(
            [*unforeseen, *site.nodes.values(), *site.partitions, differential.site.tail()]
        )
