"""Plain jobs that take a part of a GPU (`--gres=shard:N`) beside Penstock's jobs, on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("policy", ["sia", pytest.param("gandiva", marks=pytest.mark.long)])
def test_a_plain_job_with_a_part_of_a_gpu_has_that_gpu(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], policy: str
) -> None:
    """Slurm gives a GPU of which a job has a part to no other job whole. So Penstock starts what fits beside it, and no job of
    its own hangs in `Resources`: under sia the second job waits in Penstock, under gandiva the two share the other GPU. When the
    plain job ends, the next job has its GPU."""
    shares = policy == "gandiva"
    site = make_site(make_loopback("t4:1x2", shards=4, agents=shares), policy=policy)
    if shares:
        site.spool, site.slurm_settings = site.slurm.spool, site.slurm_settings | {"agents": True}
        site.extra = "\n[policy.gandiva]\nslice_s = 3.0\nmode = 'reactive'\n"
    plain = site.sbatch("--gres=shard:2", "--output=/dev/null", "--wrap=exec sleep 3600")
    site.wait_states("RUNNING", plain)
    site.start()
    ours = [site.submit(1e6, adaptivity="rigid", min_gpus=1, max_gpus=1) for _ in range(2)]

    def queue() -> list[str]:
        return site.slurm.command("squeue", "-h", "-o", "%i %T %r", "-j", ",".join(ours)).stdout.splitlines()

    def started() -> int:
        return sum(line.split()[1] in ("RUNNING", "SUSPENDED") for line in queue())

    first = 2 if shares else 1
    wait_for(lambda: started() == first, 120, f"{first} to run", details=site.tail)
    newest = site.wait_round()
    for _ in range(5):
        newest = site.wait_round(newest)
        assert started() == first
        assert not [line for line in queue() if line.endswith(" Resources")]
    assert site.states(plain) == {plain: "RUNNING"}
    site.slurm.command("scancel", plain)
    if shares:
        ours.append(site.submit(1e6, adaptivity="rigid", min_gpus=1, max_gpus=1))
    wait_for(lambda: started() == len(ours), 120, "all to start", details=site.tail)
    wait_for(lambda: all(site.starts(job) for job in ours), 120, "all to train", details=site.tail)
    assert [len(site.starts(job)) for job in ours] == [1] * len(ours), "none was stopped"
