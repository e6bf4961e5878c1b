"""One job cannot fill the store with its reports, and what matters of them is kept."""

from __future__ import annotations

from penstock_profiles.wire import Checkpointed, Observation, Report, Started
from penstock_scheduler.jobs.report_quota import BURST_BYTES, BYTES_PER_MIN, ReportQuota


def observed(job: str, sequence: int, progress: float) -> Report:
    body = Observation(
        gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=0.1, goodput=1.0, progress=progress
    )
    return Report(job_id=job, epoch=1, sequence=sequence, time_s=1.0, body=body)


def size(reports: list[Report]) -> int:
    return sum(len(report.model_dump_json()) for report in reports)


def test_a_job_that_floods_is_cut_and_its_newest_progress_is_kept() -> None:
    """1,000 observations a second for 100 s, and a checkpoint at the end."""
    quota, kept = ReportQuota(), list[Report]()
    over: set[str] = set()
    for second in range(100):
        flood = [observed("1", second * 1000 + n, second * 1000 + n) for n in range(1000)]
        admitted, dropped = quota.admit(flood, float(second))
        kept += admitted
        over |= dropped
    assert over == {"1"}
    assert size(kept) < BURST_BYTES + 100 / 60 * BYTES_PER_MIN + 3 * 4096
    assert [report.sequence for report in kept] == sorted(report.sequence for report in kept)
    saved = Report(job_id="1", epoch=1, sequence=10**6, time_s=1.0, body=Checkpointed(progress=9.0, seconds=1.0))
    newest = [observed("1", 10**6 + n, 1e6 + n) for n in range(1, 900)]
    admitted, _ = quota.admit([saved, *newest], 160.0)
    assert saved in admitted
    assert admitted[-1] == newest[-1], "its progress stays known"


def test_other_jobs_lose_nothing_and_a_job_that_calms_down_has_its_allowance_again() -> None:
    quota = ReportQuota()
    quota.admit([observed("1", n, n) for n in range(30_000)], 0.0)
    usual = [observed("2", n, n) for n in range(20)]
    assert quota.admit([observed("1", 30_000, 0.0), *usual], 0.0) == (usual, {"1"})
    later = [observed("1", 40_000 + n, n) for n in range(30)]
    assert quota.admit(later, 121.0) == (later, set())
    quota.forget(["2"])
    many = [observed("1", 50_000 + n, n) for n in range(1000)]
    assert quota.admit(many, 122.0) == (many, set())


def test_one_large_report_is_no_summary() -> None:
    quota = ReportQuota()
    large = Started(gpu_type="t4", gpu_ids={"n": (0,)}, versions={f"name{n}": "1" * 50 for n in range(900)})
    reports = [Report(job_id="1", epoch=1, sequence=n, time_s=1.0, body=large) for n in range(200)]
    kept, over = quota.admit(reports, 0.0)
    assert BURST_BYTES - 64 * 1024 < size(kept) <= BURST_BYTES
    assert over == {"1"}
