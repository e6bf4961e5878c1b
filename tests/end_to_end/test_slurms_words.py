"""`penstock explain`, `show`, `list` and `history` say of a job in any state what Slurm says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from tests.end_to_end.site import Site
from tests.end_to_end.test_any_job import told

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]


def submitted(site: Site, *options: str, wrap: str = "sleep 3600", gpus: int = 1) -> str:
    """A job that stays where it runs."""
    spec = {"min_gpus": gpus, "max_gpus": gpus, "preemptible": False}
    comment = "--comment=" + json.dumps({"penstock": spec})
    held = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null")
    return site.sbatch(*held, comment, *options, f"--wrap={wrap}")


def expect(site: Site, job: str, *, explain: str, show: str = "", listed: str = "", never: str = "\0") -> None:
    """Wait until `explain` has these words, and check the other commands, and that none has the words of `never`."""

    def said() -> str:
        return told(site, "explain", job)

    wait_for(lambda: explain in said(), 120, f"explain {job} to say {explain!r}", details=said)
    seen = told(site, "show", job)
    assert show in seen, seen
    lines = [line for line in told(site, "list").splitlines() if line.split()[:1] == [job]]
    assert listed in " ".join(lines), lines
    for text in (said(), seen, told(site, "history", job)):
        assert never not in text, text


def times_have_happened(site: Site) -> None:
    """No time that is shown is one that Slurm only expects."""
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        for job in penstock.jobs(state=("queued", "starting", "running", "ended")):
            times = [job.submit_s, job.start_s or 0.0, job.end_s or 0.0]
            times += [each.time_s for each in penstock.history(job.id).outcomes]
            times += [at for span in penstock.allocations(job.id) for at in (span.from_s, span.to_s or 0.0)]
            assert max(times) <= time.time() + 1.0, (job, times)


def test_the_commands_say_what_slurm_says_of_a_job(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    site = make_site(make_loopback("t4:1x8"))
    site.start()
    slurm = site.slurm
    suspended, stopped, requeued, kept = (submitted(site) for _ in range(4))
    site.wait_states("RUNNING", suspended, stopped, requeued, kept)
    failed = submitted(site, wrap="exit 3")
    overtaken = submitted(site, "--deadline=now+20seconds", gpus=8)
    array = submitted(site, "--array=1-12")
    site.wait_states("RUNNING", *(f"{array}_{number}" for number in (1, 2, 3, 4)))
    assert not {"RUNNING", "COMPLETED"} & {*site.states(f"{array}_10").values()}, "in the order of their numbers"

    slurm.command("scontrol", "suspend", suspended)
    expect(site, suspended, explain="is suspended", show=f"`scontrol resume {suspended}`", listed="suspended")
    slurm.command("scancel", "--full", "--signal=STOP", stopped)
    site.wait_states("STOPPED", stopped)
    expect(site, stopped, explain="is suspended", show="(STOPPED in Slurm)", listed="suspended", never="runs")
    slurm.command("scancel", "--full", "--signal=CONT", stopped)
    site.wait_states("RUNNING", stopped)
    expect(site, stopped, explain=f"Job {stopped} runs", listed="running", never="suspended")

    expect(site, failed, explain=f"Job {failed} has ended: FAILED")
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        quick = penstock.job(failed)
    assert quick.start_s is not None
    assert quick.start_s <= (quick.end_s or 0.0), "its start was between two observations"

    slurm.command("scancel", f"{array}_11")
    expect(site, f"{array}_11", explain="has ended: CANCELLED", show="CANCELLED", never="waits for Slurm to list it")
    slurm.command("scontrol", "hold", f"{array}_12")
    expect(site, f"{array}_12", explain="is held by an admin in Slurm (JobHeldAdmin)", listed="held")
    expect(site, f"{array}_10", explain="waits: other jobs have the GPUs", listed="waiting-capacity")

    slurm.command("scontrol", "requeue", requeued)
    wait_for(lambda: "requeued" in told(site, "history", requeued), 120, "history to say so")
    slurm.command("scontrol", "requeuehold", kept)
    expect(site, kept, explain="is held in Slurm", listed="held")
    times_have_happened(site)

    site.wait_states("DEADLINE", overtaken)
    expect(site, overtaken, explain=f"Job {overtaken} has ended: DEADLINE", never="waits for Slurm to end it")
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        assert penstock.job(overtaken).start_s is None, "it never ran, and Slurm shows its end as its start"
    times_have_happened(site)


@pytest.mark.long
def test_the_commands_say_what_slurm_says_after_a_minute(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    """Slurm looks at dependencies of held jobs and at time limits once a minute."""
    site = make_site(make_loopback("t4:1x4"))
    site.start()
    failed = site.sbatch("--output=/dev/null", "--wrap=exit 1")
    waits = submitted(site, f"--dependency=afterok:{failed}")
    expires = submitted(site, "--time=1")
    expect(site, waits, explain=f"its dependency afterok:{failed}", listed="waiting-cluster")
    expect(site, waits, explain="DependencyNeverSatisfied", show="cancel the job", never="held by an admin")
    site.wait_states("TIMEOUT", expires)
    expect(site, expires, explain=f"Job {expires} has ended: TIMEOUT")
    assert "ended: TIMEOUT" in told(site, "history", expires)
    times_have_happened(site)
