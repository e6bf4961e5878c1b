"""The figures of a history, from records of sacct as real sites have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.workloads.workload import Workload
from penstock_slurm.gateway.base import SlurmNode
from penstock_slurm.history import page, waits, what_if
from penstock_slurm.history.figures import PARTS, report
from penstock_slurm.history.reading import WITHOUT_GPUS, History, StepUse, parse_history, parse_used
from penstock_slurm.history.words import Table, details

HOUR = 3600
BEGIN_S = 1_700_000_000


def node(name: str, *partitions: str, **gpus: int) -> SlurmNode:
    return SlurmNode(
        name=name,
        gpus=gpus,
        gpus_used={},
        state=frozenset({"IDLE"}),
        partitions=partitions,
        cpus=64,
        cpus_used=0,
        core_cpus=1,
        memory_mb=256_000,
        memory_used_mb=0,
        reason="",
    )


def line(
    job: str,
    *,
    ready: float = 0,
    start: str | float = "Unknown",
    end: str | float = "Unknown",
    state: str = "COMPLETED",
    user: str = "ada",
    partition: str = "gpu",
    asked: str = "billing=1,cpu=1,gres/gpu=1,node=1",
    held: str = "",
    limit: str = "120",
    nodes: str = "n1",
) -> str:
    """A record with times in hours since BEGIN_S."""

    def time(text: str | float) -> str:
        return text if isinstance(text, str) else f"{BEGIN_S + text * HOUR:.0f}"

    times = (time(ready), time(ready), time(start), time(end))
    return "|".join((job, user, "lab", partition, state, *times, limit, asked, held, nodes))


def history(
    *lines: str,
    end_h: float = 10,
    nodes: tuple[SlurmNode, ...] = (node("n1", "gpu", a100=4),),
    memory: bool = True,
) -> History:
    runs, others, left_out = parse_history("\n".join(lines), {each.name: next(iter(each.gpus)) for each in nodes})
    return History(BEGIN_S, BEGIN_S + end_h * HOUR, runs, others, nodes, memory, left_out)


def test_gpus_of_a_job_are_those_that_it_held_not_those_that_it_asked_for():
    """--exclusive gives all GPUs of the node (jobstats, issue 6); a site may count only typed GPUs; MIG has dots in its types."""
    lines = (
        line(
            "1", start=0, end=1, asked="billing=2,cpu=1,mem=5G,node=1", held="cpu=36,gres/gpu:a100=4,gres/gpu=4,node=1"
        ),
        line("2", start=0, end=1, held="billing=8,cpu=8,gres/gpu:h100-80=1,mem=63000M,node=1"),
        line("3", start=0, end=1, held="cpu=9,gres/cpu=9,gres/gpu:a100_3g.20gb=1,gres/gpu=1,mem=60G,node=1"),
        line("4", start=0, end=1, held="cpu=8,gres/gpu=3,gres/gpu:a100=1,gres/gpu:a40=2"),
        line("5", start=0, end=1, held="cpu=2,gres/gpu=2,node=1"),
        line("6", start=0, end=1, held="cpu=2,node=1", asked="cpu=2,node=1"),
    )
    found = history(*lines)
    assert [(run.gpus, run.gpu_type) for run in found.runs] == [
        (4, "a100"),
        (1, "h100-80"),
        (1, "a100_3g.20gb"),
        (3, ""),
        (2, "a100"),  # by its node
    ]
    assert found.left_out == {WITHOUT_GPUS: 1}


def test_records_that_cannot_be_read_or_never_ran_are_counted():
    lines = ("1|ada|lab", line("2", state="CANCELLED by 0"), line("3", start=1, end=2, held="gres/gpu=1", nodes="n[1-"))
    assert history(*lines).left_out == {"records that cannot be read": 2, "jobs that ended before they started": 1}


def test_a_job_waits_from_the_end_of_its_dependencies_in_the_first_partition_that_it_named():
    row = line("1", ready=0, start=3, end=4, held="gres/gpu=1", state="CANCELLED by 1000", partition="gpu,long").split(
        "|"
    )
    row[6] = str(BEGIN_S + 2 * HOUR)  # Eligible
    (run,) = history("|".join(row)).runs
    assert (run.ready_s, run.state, run.partition) == (BEGIN_S + 2 * HOUR, "CANCELLED", "gpu")


def test_nine_of_ten_wait_no_longer_than_the_long_wait():
    waits = report(
        history(*(line(str(number), start=number, end=9.5, held="gres/gpu=1") for number in range(10)))
    ).by_user
    assert [(group.wait_s, group.long_wait_s) for group in waits] == [(4.5 * HOUR, pytest.approx(8.1 * HOUR))]


def test_what_comes_after_the_period_counts_in_the_next_one():
    """The job holds more GPUs than the nodes have now: one was taken away since."""
    found = report(history(line("1", start=8, end=12, held="gres/gpu=5")))
    assert (found.types[0].held_gpu_h, found.idle_gpu_h) == (pytest.approx(10), pytest.approx(32))
    assert found.by_user[0].limit_used is None


def test_hours_are_those_of_the_period_and_a_running_job_counts_until_its_end():
    held = "gres/gpu:a100=2,gres/gpu=2"
    before = line("1", ready=-6, start=-5, end=1, held=held)
    running = line("2", ready=7, start=8, state="RUNNING", held=held, user="bob")
    found = report(history(before, running))
    assert [(each.gpu_type, each.gpus, each.held_gpu_h) for each in found.types] == [("a100", 4, pytest.approx(6.0))]
    assert found.idle_gpu_h == pytest.approx(34.0)
    assert [(group.name, group.gpu_h) for group in found.by_user] == [
        ("bob", pytest.approx(4)),
        ("ada", pytest.approx(2)),
    ]
    (bob, ada) = found.by_user
    assert (bob.wait_s, ada.wait_s) == (HOUR, None), "the one began in the period, the other before"
    assert (bob.limit_used, ada.limit_used) == (None, pytest.approx(3.0)), "the one ended in it"


def test_idle_while_waiting_is_what_could_have_run():
    """Four GPUs: two held for 10 h; a job of one GPU waits from 2 to 5, one of four from 6 on, of which two fit."""
    lines = (
        line("1", start=0, state="RUNNING", held="gres/gpu=2"),
        line("2", ready=2, start=5, end=6, held="gres/gpu=1"),
        line("3", ready=6, state="PENDING", asked="cpu=1,gres/gpu=4"),
    )
    assert report(history(*lines)).idle_while_waiting_gpu_h == pytest.approx(3 * 1 + 4 * 2)


FREE_ON_BOTH = tuple(
    line(name, start=0, state="RUNNING", held="gres/gpu=2,node=1", nodes=name) for name in ("n1", "n2")
)
"""Two jobs leave two of four GPUs free on each of two nodes."""


def without_gpus(amounts: str, start: float = 0, end: str | float = "Unknown") -> tuple[str]:
    """A job on n1 alone."""
    return (line("1", start=start, end=end, asked=amounts, held=f"{amounts},node=1"),)


ALL_CPUS, ALL_MEMORY = "cpu=64", "cpu=1,mem=256000M"


@pytest.mark.parametrize(
    ("asked", "others", "memory", "cause"),
    [
        ("cpu=1,gres/gpu=5,node=1", FREE_ON_BOTH, True, waits.GPUS),
        ("cpu=1,gres/gpu=1,gres/gpu:v100=1,node=1", FREE_ON_BOTH, True, waits.GPUS),
        ("cpu=1,gres/gpu=4,node=1", FREE_ON_BOTH, True, waits.TOGETHER),
        ("cpu=2,gres/gpu=4,node=2", FREE_ON_BOTH, True, waits.OTHER),
        ("cpu=1,gres/gpu=8", (), True, waits.OTHER),  # four on each node
        ("cpu=1,gres/gpu=8", FREE_ON_BOTH, True, waits.GPUS),
        ("cpu=2,gres/gpu=2", without_gpus(ALL_CPUS), True, waits.OTHER),  # on n2
        ("cpu=2,gres/gpu=2,node=2", without_gpus(ALL_CPUS), True, waits.BESIDE),
        ("cpu=2,mem=2G,gres/gpu=2,node=2", without_gpus(ALL_MEMORY), True, waits.BESIDE),
        ("cpu=2,mem=2G,gres/gpu=2,node=2", without_gpus(ALL_MEMORY), False, waits.OTHER),
        ("cpu=1,gres/gpu=2,node=2", without_gpus(ALL_CPUS, -3, -1), True, waits.OTHER),
    ],
)
def test_a_job_waits_for_what_no_node_has_free(asked: str, others: tuple[str, ...], memory: bool, cause: str):
    """It waits for four of ten hours."""
    waiting = (
        line("9", ready=3, start=7, end=8, asked=asked, held=asked)
        if cause is waits.OTHER
        else line("9", ready=6, state="PENDING", asked=asked)
    )
    past = history(*others, waiting, nodes=tuple(node(name, "gpu", a100=4) for name in ("n1", "n2")), memory=memory)
    found = report(past)
    assert found.waited_h == pytest.approx(dict.fromkeys(waits.CAUSES, 0.0) | {cause: 4.0}, abs=0.03)
    table = next(block for block in details(found) if isinstance(block, Table) and block.columns[0] == "WAITED FOR")
    assert dict(zip(waits.CAUSES, table.rows, strict=True))[cause] == (cause, "4.0", "100%")


def test_a_record_that_starts_before_it_is_ready_has_not_waited():
    past = history(line("1", ready=5, start=3, end=8, held="gres/gpu=1,node=1"))
    assert set(report(past).waited_h.values()) == {0.0}


STEPS = """7|
7.batch|cpu=00:30:00,energy=0,fs/disk=1,mem=1000M,pages=0,vmem=9G
7.extern|cpu=00:00:00,mem=0
7.0|cpu=1-00:00:00,mem=1.5G
7.1|cpu=later,mem=4G
8.batch|cpu=00:01:00
9.batch|
10.batch|mem=3000M
"""


def test_a_job_has_used_the_time_of_all_its_steps_and_the_memory_of_the_largest():
    assert parse_used(STEPS) == {"7": StepUse(88_200.0, 1536), "8": StepUse(60.0, 0), "10": StepUse(0.0, 3000)}


def test_shares_are_of_the_cpus_and_the_memory_that_ended_jobs_held():
    """In two runs, job 7 held 8 CPUs for 4 hours. Job 8 still runs, and Slurm has samples of its ended steps alone."""
    held = "cpu=8,gres/gpu=1,mem=2G"
    runs = [
        line("7", start=0, end=1, state="REQUEUED", held=held),
        line("7", ready=1, start=1, end=4, held=held),
        line("8", start=0, state="RUNNING", held=held, user="bob"),
        line("10", start=0, end=1, held="gres/gpu=1", user="eve"),
    ]
    found = report(history(*runs), used=parse_used(STEPS))
    shares = {group.name: (group.cpu_used, group.memory_used) for group in found.by_user}
    assert shares == {"ada": (88_200 / (8 * 4 * HOUR), 0.75), "bob": (None, None), "eve": (None, None)}
    (table,) = (each for each in details(found) if isinstance(each, Table) and each.columns[0] == "USER")
    assert table.columns[-3:] == ("LIMIT USED", "CPUS USED", "MEMORY USED")
    assert {row[0]: row[-2:] for row in table.rows} == {"ada": ("77%", "75%"), "bob": ("-", "-"), "eve": ("-", "-")}


def test_the_picture_is_of_the_gpus_held_and_waited_for_in_the_period():
    """Held: 4 GPUs from the first hour before the period to its middle. Waited for: one GPU, for its last quarter."""
    held = line("1", ready=-1, start=-1, end=5, held="gres/gpu=4")
    found = report(history(held, line("2", ready=7.5, state="PENDING"))).levels
    assert len(found.times_s) == len(found.held) == len(found.waited) == PARTS
    assert found.held == (4.0,) * (PARTS // 2) + (0.0,) * (PARTS // 2)
    assert found.waited == (0.0,) * (PARTS * 3 // 4) + (1.0,) * (PARTS // 4)
    assert BEGIN_S < found.times_s[0] < found.times_s[-1] < BEGIN_S + 10 * HOUR


def test_the_page_shows_names_as_text_and_has_no_script(tmp_path: Path):
    found = report(history(line("1", start=0, end=2, user="<script>alert(1)</script>", held="gres/gpu=4")))
    path = tmp_path / "gpus.html"
    path.write_text("the former one")
    page.write(path, found, ["The simulation assumes:\n- one\n- two"])
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "GPUs were idle for 32.0 GPU-hours (80%)" in text
    assert "The simulation assumes:<br>- one<br>- two" in text
    assert [*tmp_path.iterdir()] == [path]


def test_a_page_where_nobody_may_write_is_refused_at_once(tmp_path: Path):
    done = CliRunner().invoke(make_app(), ["observe", "--html", str(tmp_path / "none" / "gpus.html")])
    assert isinstance(done.exception, ConfigError)
    assert "none is no folder that you may write to" in str(done.exception)


def test_a_requeued_job_is_one_job_with_all_its_time():
    lines = (
        line("7", ready=0, start=1, end=2, state="REQUEUED", held="gres/gpu=1"),
        line("7", ready=2, start=4, end=5, held="gres/gpu=1"),
        line("8", ready=-2, start=-1, end=3, held="gres/gpu=1"),
        line("9", ready=5, start=6, state="RUNNING", held="gres/gpu=1"),
    )
    found = history(*lines)
    assert report(found).jobs == 3
    jobs, begin_s, _ = what_if.jobs_of(found, 100)
    assert begin_s == BEGIN_S
    assert [(job.first.job_id, job.counts, job.ran_s / HOUR) for job in jobs] == [
        ("8", False, 3.0),  # what was left of it
        ("7", True, 2.0),
        ("9", False, 4.0),  # it still runs
    ]
    case = what_if.recorded(jobs)
    assert (case.completion_h, case.wait_h) == ((5.0, 5.0), (3.0, 3.0))


def test_what_if_keeps_partitions_and_elastic_users_gain():
    """One GPU type is in no catalogue. Nothing waits, therefore only elastic jobs can end earlier."""
    nodes = (node("n1", "gpu", a100=4), node("n2", "gpu", a100=4), node("x1", "other", quantum9=8))
    lines = [
        line(str(number), ready=number / 10, start=number / 10, end=number / 10 + 2, held="gres/gpu:a100=2,gres/gpu=2")
        for number in range(4)
    ]
    lines += [
        line(
            str(number),
            ready=number,
            start=number,
            end=number + 1,
            held="gres/gpu:quantum9=4,gres/gpu=4",
            partition="other",
        )
        for number in range(4, 6)
    ]
    found = history(*lines, nodes=nodes)
    jobs, begin_s, _ = what_if.jobs_of(found, 100)
    cases = list(what_if.what_if(found, jobs, begin_s))
    assert [case.name for case in cases][:2] == ["Slurm's backfill", "Penstock, as they are"]
    plain, same, *_, elastic = (case.completion_h for case in cases)
    assert plain == pytest.approx(what_if.recorded(jobs).completion_h, rel=0.05)
    assert same == pytest.approx(plain, rel=0.1)
    assert elastic[1] < plain[0]


def test_rigid_jobs_stay_on_the_types_of_their_partition_and_are_never_stopped():
    nodes = (node("n1", "gpu", a100=4), node("x1", "other", t4=8))
    found = history(line("1", start=0, end=1, held="gres/gpu:a100=1,gres/gpu=1"), nodes=nodes)
    jobs, begin_s, _ = what_if.jobs_of(found, 10)
    workload: Workload = what_if.workload_of(jobs, begin_s, found)
    (job,) = workload.jobs
    assert (job.spec.gpu_types, job.spec.preemptible, job.gpu_type) == (("a100",), False, "a100")


def test_a_job_that_no_node_could_run_any_more_is_left_out_alone():
    lines = (
        line("1", start=0, end=1, held="gres/gpu:a100=4,gres/gpu=4"),
        line("2", start=0, end=1, held="gres/gpu:a100=8,gres/gpu=8"),
        line("3", start=0, end=1, held="gres/gpu:v100=1,gres/gpu=1", asked="gres/gpu:v100=1,gres/gpu=1"),
        line("4", start=0, end=1, held="gres/gpu=1", partition="gone"),
    )
    jobs, _, left_out = what_if.jobs_of(history(*lines), 10)
    assert ([job.first.job_id for job in jobs], left_out) == (["1"], 3)
