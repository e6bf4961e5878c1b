"""`penstock slurm check --submit`: one job on one GPU goes the whole way of an adaptive job, up to its report in penstockd."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from penstock_scheduler.api.messages import ExplanationView, JobView
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import duration
from penstock_slurm.gateway import CliGateway, SlurmError
from penstock_slurm.install.answers import Finding
from penstock_slurm.install.plan import InstallTarget

START_WAIT_S = 300.0
"""How long the job may wait for its GPU, s: the cluster may be busy, or boot a node."""
REPORT_WAIT_S = 60.0
"""How long its end and its report may take, s. It runs for `RUN_S`, and slurmctld may take some seconds to say that it ended."""
RUN_S = 5
POLL_S = 1.0

SCRIPT = f"""
test -n "$PENSTOCK_SPOOL" || exit 41
test -d "$PENSTOCK_SPOOL" || exit 42
job=$PENSTOCK_SPOOL/$SLURM_JOB_ID
test -r "$job/control.json" || exit 43
field() {{ sed -n "s/.*\\"$1\\":\\"*\\([^,\\"}}]*\\).*/\\1/p" "$job/control.json"; }}
epoch=$(field epoch)
report() {{
  printf '{{"version":1,"job_id":"%s","epoch":%s,"sequence":%s,"time_s":%s,"body":{{%s}}}}\\n' \\
    "$SLURM_JOB_ID" "$epoch" "$1" "$(date +%s)" "$2" >> "$job/reports/$epoch.jsonl"
}}
gpus="\\"gpu_type\\":\\"$(field gpu_type)\\",\\"gpu_ids\\":{{\\"$SLURMD_NODENAME\\":[0]}}"
report 0 "\\"kind\\":\\"started\\",$gpus,\\"total\\":1,\\"answers_requests\\":false" || exit 44
touch "$PENSTOCK_SPOOL/inbox/$SLURM_JOB_ID" || exit 45
sleep {RUN_S}
report 1 '"kind":"ended","outcome":"completed","progress":1' || exit 44
touch "$PENSTOCK_SPOOL/inbox/$SLURM_JOB_ID" || exit 45
"""
"""It does in plain shell as a job with penstock_executor does: a node may have neither Python nor Penstock. The exit status
says which step failed; see `MISSING`."""

MISSING = {
    41: "PENSTOCK_SPOOL is not set in the job: does penstock_site.lua have the spool (`penstock slurm sync`), and does "
    "slurmctld use this penstock.lua (`penstock slurm install --apply`)?",
    42: "the folder in PENSTOCK_SPOOL is not on the job's node: mount it there, at the path of [slurm] spool_dir",
    43: "the job's user cannot read the control message in the spool: is it the same folder on the node as on this host, and "
    "may each user enter it (chmod 755)?",
    44: "the job's user cannot write its reports folder in the spool: look at the mount's options, and for root_squash",
    45: "the job's user cannot write to the folder `inbox` of the spool, which penstockd makes with mode 1777",
}
"""Exit status of the job -> what is missing."""


def check_real_job(
    site: InstallTarget, submit: Callable[..., str | Finding], now_s: Callable[[], float] = time.monotonic
) -> Iterator[Finding]:
    """Submit the job, follow it, and cancel it if it is not over. The first finding with a remedy is the last one.

    Args:
        site: the Slurm.
        submit: submits a job with these flags of sbatch and a script. Returns its id, or why it could not be submitted.
        now_s: a clock.
    """
    try:
        from penstock_scheduler.api.client import Client
    except ModuleNotFoundError as error:
        yield Finding("penstockd can be asked", f"{error}; install Penstock with its extra `service`")
        return
    socket = site.settings.section(ApiSettings).socket
    with Client(f"unix:{socket}") as penstock:
        try:
            penstock.ready()
        except PenstockError as error:
            yield Finding("penstockd answers", str(error))
            return
        yield Finding("penstockd answers")
        job = submit("--adaptive", "--max-gpus=1", "--non-preemptible", "--chdir=/tmp", script=SCRIPT)
        if isinstance(job, Finding):
            yield job
            return
        yield Finding(f"sbatch takes an adaptive job ({job})")
        try:
            yield from _followed(job, lambda: _view(penstock.job, job), lambda: _why(penstock.explain, job), now_s)
        finally:
            with contextlib.suppress(SlurmError):
                CliGateway(conf=site.slurm.conf, timeout_s=site.slurm.command_timeout_s).cancel(job)


def _followed(
    job: str, look: Callable[[], JobView | None], why: Callable[[], str], now_s: Callable[[], float]
) -> Iterator[Finding]:
    """The steps from the queue to the report.

    Args:
        look: how penstockd sees the job, or None if it does not.
        why: penstockd's explanation.
    """
    view = _until(look, lambda view: view.state not in ("queued", "starting"), START_WAIT_S, now_s)
    what = f"job {job} starts on a GPU"
    if view is None:
        yield Finding(what, "penstockd does not see the job: is its partition in [slurm] partitions?")
        return
    if view.state in ("queued", "starting"):
        yield Finding(f"{what} within {duration(START_WAIT_S)}", why())
        return
    where = f" ({', '.join(view.allocation.nodes)})" if view.allocation is not None else ""
    yield Finding(what + where)
    view = _until(look, lambda view: view.state == "ended", REPORT_WAIT_S, now_s) or view
    what = "the job finds its spool and writes its report"
    if view.state != "ended":
        yield Finding(what, f"it has not ended after {duration(REPORT_WAIT_S)}; `penstock explain {job}` says why")
        return
    if view.ended != "COMPLETED":
        told = MISSING.get(view.exit_code or 0) or f"it ended as {view.ended}, exit status {view.exit_code}"
        yield Finding(what, told)
        return
    yield Finding(what)
    view = _until(look, lambda view: view.progress == 1, REPORT_WAIT_S, now_s) or view
    remedy = "penstockd's log says why a report is not read; is [slurm] spool_dir the folder that the job wrote to?"
    yield Finding("its report reaches penstockd", "" if view.progress == 1 else remedy)


def _why(explain: Callable[[str], ExplanationView], job_id: str) -> str:
    """Why the job waits; where penstockd does not say, how to ask later."""
    try:
        return f"{explain(job_id).text}. If all GPUs are taken, run the check again later"
    except PenstockError as error:
        return str(error)


def _view(job: Callable[[str], JobView], job_id: str) -> JobView | None:
    """How penstockd sees the job, or None if it does not, or if it does not answer at the moment."""
    try:
        return job(job_id)
    except PenstockError:
        return None


def _until(
    look: Callable[[], JobView | None], good: Callable[[JobView], bool], wait_s: float, now_s: Callable[[], float]
) -> JobView | None:
    """The newest view of the job: a good one, or what there is when the time is over."""
    until_s, view = now_s() + wait_s, look()
    while (view is None or not (good(view) or view.state == "ended")) and now_s() < until_s:
        time.sleep(POLL_S)
        view = look() or view
    return view
