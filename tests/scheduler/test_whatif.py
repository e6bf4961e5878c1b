"""`penstock simulate whatif`: a record that a daemon's loop has really written, replayed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from penstock_profiles.colocation import Colocation, Pair
from penstock_profiles.estimators import TableEstimator
from penstock_profiles.families import load_families
from penstock_profiles.wire import Ended, Observation, Report, Started
from penstock_scheduler.api.ports import ClusterParts
from penstock_scheduler.cli import make_app
from penstock_scheduler.cli.sharing import Learned, SharingOptions, shared_by
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.pairs import PAIRS, open_pairs
from penstock_scheduler.model import GpuClass, Job, JobSpec, JobUse, Pack, Phase, Plan, SharedGpus, SharingState
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from penstock_scheduler.simulator.agents import SharingKind, SimulatedAgents
from penstock_scheduler.simulator.recorded import recorded_history
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on, snapshot, staged, table

RATES = {"t4": {1: 1.0, 2: 1.9, 4: 3.6, 8: 6.0}, "a100": {1: 4.0, 2: 7.6, 4: 14.0, 8: 24.0}}
RESTART_S = 30.0
FIRST_S = 1.7e9
JOBS = 6


NET = SharingKind("net", 0.5, 6000)
TRUE_PAIRS = Colocation({("t4", "net", "net"): Pair(share=0.8), ("a100", "net", "net"): Pair(share=0.8)})


def record(
    folder: Path,
    until_s: float = 20_000.0,
    *,
    policy: str = "sia",
    agents: bool = False,
    nodes: str = "t4:2x4,a100:1x4",
    spec: Callable[[int], JobSpec] = lambda number: JobSpec(max_gpus=8, goodput_table=RATES),
) -> list[SimulatedJob]:
    """Six jobs on a simulated cluster, with the rounds in a store as penstockd keeps them; what became of them.

    With agents its nodes have some, and the state folder what was learned of pairs. Then all jobs are nets: two on one GPU have
    0.8 of their speed each.
    """
    clock = SimulatedClock(FIRST_S)
    work = [4000.0 * (1 + number % 3) for number in range(JOBS)]
    jobs = [
        SimulatedJob(
            str(number),
            f"j{number}",
            spec(number),
            EstimatedJob(TableEstimator(RATES), work[number], RESTART_S),
            FIRST_S + 65.0 * number,
        )
        for number in range(JOBS)
    ]
    told = SimulatedAgents({job.id: NET for job in jobs}, TRUE_PAIRS, gpu_memory_mb={"t4": 15_000}) if agents else None
    cluster = SimulatedCluster(nodes_from_spec(nodes), jobs, clock, agents=told)
    decider, choice = make_policy(policy)
    store = open_store(folder, writer=True)
    models = SpecModels(load_families(), RESTART_S)
    loop = RoundLoop(
        ClusterParts(cluster, agents=cluster if agents else None),
        clock,
        store,
        RoundTiming(Period(60.0), 10.0),
        decider,
        models,
        choice,
        RoundSurroundings(annotators=(open_pairs(folder / PAIRS),) if agents else ()),
    )
    ended_s = FIRST_S + until_s
    loop.run(lambda: cluster.finished or clock.now_s() > ended_s)
    clock.sleep(60.0)
    loop.tick()
    store.close()
    assert cluster.finished == (until_s >= 20_000.0)
    return jobs


def whatif(store: Path, *argv: object) -> Result:
    result = CliRunner().invoke(make_app(), ["simulate", "whatif", "--store", str(store), *map(str, argv)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(store: Path, *argv: object) -> dict[str, object]:
    return json.loads(whatif(store, "--json", *argv).stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SimulatedJob]]:
    """(store, jobs) of a whole record, to be read alone."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, record(folder)


def test_the_rounds_of_these_records_are_stored_as_differences(recorded: tuple[Path, list[SimulatedJob]]):
    """So the other tests here show that `whatif` reads them."""
    with open_store(recorded[0]).read() as db:
        whole, differences = (db.scalar(sa.text(f"SELECT count(*) FROM rounds WHERE key_round IS {what}"))
                              for what in ("NULL", "NOT NULL"))  # fmt: skip
    assert differences > 2 * whole > 0


def test_the_same_cluster_and_policy_give_what_really_happened(recorded):
    """Known to a round (60 s): the record alone does not tell at which instant jobs started and ended."""
    store, jobs = recorded
    document = told(store, "--policy", "sia,fifo")
    assert list(document["policies"]) == ["recorded", "sia", "fifo"]
    real = sum(job.finish_s - job.submit_s for job in jobs) / JOBS
    recorded, again = (document["policies"][name]["mean"] for name in ("recorded", "sia"))
    assert recorded["ended"] == again["ended"] == JOBS
    assert recorded["avg_jct_h"] * 3600 == pytest.approx(real, abs=60)
    assert again["avg_jct_h"] == pytest.approx(recorded["avg_jct_h"], rel=0.1)


def test_more_nodes_help_and_fewer_do_not(recorded):
    average = {
        change: told(recorded[0], *change)["policies"]["sia"]["mean"]["avg_jct_h"]
        for change in ((), ("--add-nodes", "a100:2x4"), ("--remove-nodes", "a100:1x4"))
    }
    more, same, fewer = average["--add-nodes", "a100:2x4"], average[()], average["--remove-nodes", "a100:1x4"]
    assert more < 0.9 * same < same < fewer


def test_a_type_on_which_no_job_ran_needs_like(recorded):
    store, _ = recorded
    with pytest.raises(ConfigError, match=r"no job of the record has run on h100; .* --like h100=t4:2"):
        whatif(store, "--add-nodes", "h100:2x8")
    with pytest.raises(ConfigError, match="the record has no v100; it has a100, t4"):
        whatif(store, "--add-nodes", "h100:2x8", "--like", "h100=v100:2")
    helped = told(store, "--add-nodes", "h100:2x8", "--like", "h100=a100:2")
    assert helped["cluster"] == "t4:2x4,a100:1x4,h100:2x8"
    assert helped["policies"]["sia"]["mean"]["avg_jct_h"] < helped["policies"]["recorded"]["mean"]["avg_jct_h"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--remove-nodes", "a100:2x4"), "there are fewer; the record has t4:2x4,a100:1x4"),
        (("--remove-nodes", "t4:2x4,a100:1x4"), "leaves no node"),
        (("--like", "h100"), "is not NEW=KNOWN:TIMES"),
        (("--policy", ""), "names no policy"),
        (
            ("--policy", "fifo", "--pairs", "p.json"),
            "--pairs is for policies that let jobs share GPUs, and none of fifo",
        ),
        (
            ("--policy", "sia", "--stage", "gandiva-share"),
            r"under policy sia.gandiva-share jobs share GPUs, but the record shows .*--pairs FILE, .* --assume-utilisation",
        ),
    ],
)
def test_what_cannot_be_is_said(recorded, change, words):
    with pytest.raises(ConfigError, match=words):
        whatif(recorded[0], *change)


def test_the_page_says_what_the_record_cannot_tell(tmp_path):
    record(tmp_path / "s", until_s=700)
    document = told(tmp_path / "s", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    left = [note for note in document["notes"] if "do not tell how much is left: they are left out" in note]
    assert left
    assert left[0] in page
    assert "recorded: the job on each GPU" in page


def report(job: str, epoch: int, sequence: int, at_s: float, body: object) -> Report:
    return Report(job_id=job, epoch=epoch, sequence=sequence, time_s=FIRST_S + at_s, body=body)  # type: ignore[arg-type]


def seen(progress: float) -> Observation:
    return Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=1, steps=1, step_time_s=1.0, progress=progress)


def test_reports_tell_work_by_hand(tmp_path):
    """Job 0 ran 100 s on 1 T4 (rate 1) and 50 s on 2 (1.9): 195; of the 300 that it then had done, 60 were done twice: 162.5.

    Job 1 ran 100 s on 1 T4, has done 25 of the 100 that it says are all, and goes on: 400.
    """
    record(tmp_path / "s", until_s=650)
    store = open_store(tmp_path / "s")
    one, two = {"t4-00": (0,)}, {"t4-00": (0, 1)}
    reports = [
        report("0", 1, 0, 60, Started(gpu_type="t4", gpu_ids=one)),
        report("0", 1, 1, 160, seen(160)),
        report("0", 2, 0, 200, Started(gpu_type="t4", gpu_ids=two, progress=100)),
        report("0", 2, 1, 250, Ended(outcome="completed", progress=300)),
        report("1", 1, 0, 120, Started(gpu_type="t4", gpu_ids=one, total=100)),
        report("1", 1, 1, 220, seen(25)),
    ]
    found = recorded_history((store.round(number) for number in store.round_numbers()), reports)
    assert found.truths["0"].work == pytest.approx(195 * 300 / 360)
    assert found.lived[0].finish_s == 250
    assert [run.end_s - run.start_s for run in found.lived[0].runs] == pytest.approx([100, 50])
    jobs = {job.id: job for job in found.lived}
    assert jobs["1"].finish_s is None
    assert found.truths["1"].work == pytest.approx(400)
    assert found.ended == {"0"} | {job.id for job in found.lived if job.finish_s is not None}
    assert any("had not ended when the record ends" in note for note in found.notes)


def one_gpu(number: int) -> JobSpec:
    return JobSpec(max_gpus=1, goodput_table={gpu_type: {1: rates[1]} for gpu_type, rates in RATES.items()})


def on_two_gpus(folder: Path, policy: str, spec: Callable[[int], JobSpec] = one_gpu) -> list[SimulatedJob]:
    return record(folder, 60_000.0, policy=policy, agents=True, nodes="t4:1x2", spec=spec)


@pytest.fixture(scope="module")
def shared_record(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SimulatedJob]]:
    """(store, jobs) of a record under `gandiva`, to be read alone."""
    folder = tmp_path_factory.mktemp("shared")
    return folder, on_two_gpus(folder, "gandiva")


@pytest.fixture
def shared_history(shared_record: tuple[Path, list[SimulatedJob]]) -> Path:
    return shared_record[0]


@pytest.mark.parametrize("policy", ["gandiva", pytest.param(staged("fifo", "gandiva-share"), marks=pytest.mark.long)])
def test_recorded_history_with_shared_gpus_counts_the_work_that_jobs_did(tmp_path, shared_record, policy):
    """Two GPUs, six jobs in time slices and in packs. The time that they held GPUs would say more."""
    folder, jobs = shared_record if policy == "gandiva" else (tmp_path, on_two_gpus(tmp_path, policy))
    store = open_store(folder)
    found = recorded_history((store.round(number) for number in store.round_numbers()), ())
    assert {job: truth.work for job, truth in found.truths.items()} == {
        job.id: pytest.approx(job.work, rel=0.02) for job in jobs
    }
    held_s = sum(run.end_s - run.start_s for job in jobs for run in job.runs)
    assert sum(job.work for job in jobs) < 0.9 * held_s, "they did share"
    known = {(job.kind, job.gpu_utilisation, job.gpu_mem_mb) for job in found.workload.jobs}
    assert known == {("net", 0.5, 6000)}, "what the agents have seen"
    assert found.gpu_memory_mb == {"t4": 15_000}
    assert found.gpu_seconds is not None
    assert found.gpu_seconds <= 2 * found.end_s, "a shared GPU counts once"
    assert found.gpu_seconds == pytest.approx(2 * found.end_s, rel=0.15)
    assert any(
        "figures of GPU-hours, queue and feedback count a suspended job as one that has GPUs" in n for n in found.notes
    )


def test_a_sharing_policy_replays_the_recorded_history(tmp_path, shared_history):
    """By what the daemon has learned: kinds, utilisation, memory and pairs, of which two nets have 0.8 each."""
    document = told(shared_history, "--policy", "gandiva,fifo")
    recorded, again, fifo = (document["policies"][name]["mean"] for name in ("recorded", "gandiva", "fifo"))
    assert again["avg_jct_h"] == pytest.approx(recorded["avg_jct_h"], rel=0.03)
    assert again["packs"] > 0
    assert (recorded["packs"], fifo["packs"]) == (None, None)
    assert again["avg_jct_h"] < fifo["avg_jct_h"]
    assert f"Pairs of jobs: what the site has learned ({shared_history / PAIRS})." in document["notes"]
    assert document["assumed"] == {"utilisation": None, "utilisation_of": [], "memory_fits_of": []}
    shutil.copytree(shared_history, tmp_path / "s", ignore=shutil.ignore_patterns(PAIRS))
    without = told(tmp_path / "s", "--policy", "gandiva")
    assert "Pairs of jobs: as the record's rounds have them." in without["notes"]
    assert without["policies"]["gandiva"]["mean"]["avg_jct_h"] == pytest.approx(again["avg_jct_h"], rel=0.03)


def test_how_fast_opportunistic_jobs_were_is_not_recorded(tmp_path):
    def spec(number: int) -> JobSpec:
        gpu_class = GpuClass.OPPORTUNISTIC if number % 2 else GpuClass.GUARANTEED
        return one_gpu(number).model_copy(update={"gpu_class": gpu_class})

    jobs = on_two_gpus(tmp_path, "antman", spec)
    store = open_store(tmp_path)
    found = recorded_history((store.round(number) for number in store.round_numbers()), ())
    residents = {job.id: pytest.approx(job.work, rel=0.06) for job in jobs if job.spec.gpu_class is GpuClass.GUARANTEED}
    assert {job: found.truths[job].work for job in residents} == residents, "but for the tolerated 5 %"
    left_out = {job.id for job in jobs} - found.truths.keys()
    assert left_out
    assert left_out.isdisjoint(residents)
    assert f"{len(left_out)} jobs shared GPUs, and it is not recorded how fast they were" in " ".join(found.notes)


def in_time_slices(
    round_s: float, until_s: float, told_s: Callable[[float, str], float], **moved: Phase
) -> Iterator[RoundRecord]:
    """Rounds in which a and b have one GPU in time slices, from the second to the last but one.

    Args:
        told_s: (time, job) -> what the agent has told by then that it ran, s.
        moved: by id, jobs that have another GPU in the second round, and their phase from the third on.
    """
    times = [number * round_s for number in range(int(until_s / round_s) + 2)]
    time_slices = SharingState((SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",)))),))
    for time_s in times:
        jobs: list[Job] = []
        if time_s == 0:
            jobs = [job(each) for each in "ab"]
        elif time_s == round_s:
            jobs = [
                job(each, phase=Phase.RUNNING, allocation=on("t4", **{f"t4_0{each in moved:d}": 1})) for each in "ab"
            ]
        elif time_s < times[-1]:
            jobs = [job(each, phase=moved.get(each, Phase.RUNNING), allocation=on("t4", t4_00=1)) for each in "ab"]
        there = snapshot("t4:2x1", jobs, {each.id: table(t4={1: 1.0}) for each in jobs}, time_s=FIRST_S + time_s)
        uses = {each.id: JobUse("net", 1.0, ran_s=told_s(time_s, each.id)) for each in jobs}
        yield RoundRecord(
            replace(there, sharing=replace(time_slices, uses=uses)), PolicyChoice(name="gandiva"), Plan(1)
        )


@pytest.mark.parametrize(("slice_s", "round_s"), [(60, 60), (75, 60), (60, 30), (100, 60), (60, 200)])
def test_slices_may_be_longer_than_rounds(slice_s, round_s):
    """An agent tells what ran when the slice has ended, so that some rounds see more than they are long, and others nothing."""

    def told_s(time_s: float, job_id: str) -> float:
        slices = time_s // slice_s
        return slice_s * ((slices + 1) // 2 if job_id == "a" else slices // 2)

    found = recorded_history(in_time_slices(round_s, 60_000.0, told_s), ())
    assert {name: truth.work for name, truth in found.truths.items()} == {
        "a": pytest.approx(30_000, rel=0.01),
        "b": pytest.approx(30_000, rel=0.01),
    }


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.STARTING])
def test_a_job_that_never_had_a_time_slice_is_left_out(phase):
    """It ran 10 s elsewhere before."""
    found = recorded_history(
        in_time_slices(60.0, 6000.0, lambda time_s, job_id: time_s if job_id == "a" else 10.0, b=phase), ()
    )
    assert list(found.truths) == ["a"]
    notes = " ".join(found.notes)
    assert "1 job never ran, never had a time slice on shared GPUs, or had not ended" in notes
    assert "how fast they were beside the others" not in notes


def test_the_jobs_own_reports_say_what_they_lose(tmp_path):
    """No agents. Two were sampled to use 0.3 and 0.5 of a GPU, so that beside each other they have all their speed."""

    def trial(number: int) -> JobSpec:
        return one_gpu(number).model_copy(update={"trial_group": "night"})

    record(tmp_path, 60_000.0, policy="fifo", nodes="t4:1x1", spec=trial)
    alone = told(tmp_path, "--policy", "gandiva", "--assume-utilisation", 1)
    mean = alone["policies"]["gandiva"]["mean"]
    assert mean["makespan_h"] >= 0.99 * sum(range(1, 4)) * 2 * 4000 / 3600, (
        "time slices: the GPU does no more than before"
    )
    assert alone["assumed"]["utilisation"] == 1
    assert sorted(alone["assumed"]["utilisation_of"]) == [str(number) for number in range(JOBS)]
    assert (
        "6 of 6 jobs are trials of a search. None ends early, because their results are not simulated."
        in alone["notes"]
    )

    store = open_store(tmp_path, writer=True)
    sampled = [(0, 0.2, 60), (0, 0.4, 60), (1, 0.5, 10)]
    store.add_reports(
        [
            report(
                str(job),
                1,
                number,
                100.0,
                Observation(
                    gpu_type="t4",
                    nodes=1,
                    gpus=1,
                    atomic_batch=1,
                    steps=steps,
                    step_time_s=1.0,
                    progress=0,
                    utilisation=share,
                    memory_mb=4000,
                    device_memory_mb=5000 + number,
                ),
            )
            for number, (job, share, steps) in enumerate(sampled)
        ]
    )
    store.close()
    store = open_store(tmp_path)
    found = recorded_history((store.round(number) for number in store.round_numbers()), store.reports())
    asked = {job.id: (job.gpu_utilisation, job.gpu_mem_mb) for job in found.workload.jobs}
    assert asked["0"] == (pytest.approx(0.3), 5001)
    assert asked["1"] == (0.5, 5002)
    assert asked["2"] == (None, None)
    some = told(tmp_path, "--policy", "gandiva")
    assert sorted(some["assumed"]["utilisation_of"]) == ["2", "3", "4", "5"]
    assert sorted(some["assumed"]["memory_fits_of"]) == ["2", "3", "4", "5"]
    assert some["policies"]["gandiva"]["mean"]["makespan_h"] < mean["makespan_h"] - 0.5, "0 and 1 ran beside each other"


def test_another_tables_pairs_may_stand_for_the_records(tmp_path, shared_history):
    """Half their speed beside themselves on a p100, which stands for the t4: packs are tried, and gain nothing."""
    table = {"p100": {"net": {"null": 10.0, "net": [5.0, 5.0]}}}
    (tmp_path / "pairs.json").write_text(json.dumps(table))
    own = ("--policy", "gandiva", "--pairs", tmp_path / "pairs.json")
    with pytest.raises(ConfigError, match=r"no pairs on t4; it has p100: say which of these .* --pair-types t4=p100"):
        told(shared_history, *own)
    document = told(shared_history, *own, "--pair-types", "t4=p100")
    assert f"Pairs of jobs: {tmp_path / 'pairs.json'}." in document["notes"]
    learned = told(shared_history, "--policy", "gandiva")
    slow, fast = (each["policies"]["gandiva"]["mean"]["makespan_h"] for each in (document, learned))
    assert slow > 1.1 * fast


def test_pairs_of_a_type_stand_for_one_that_is_like_it(shared_history):
    change = ("--add-nodes", "h100:1x2", "--remove-nodes", "t4:1x2", "--like", "h100=t4:1", "--policy", "gandiva")
    there = told(shared_history, *change)["policies"]["gandiva"]["mean"]
    here = told(shared_history, "--policy", "gandiva")["policies"]["gandiva"]["mean"]
    assert there["makespan_h"] == pytest.approx(here["makespan_h"])


def test_the_memory_of_gpus_is_the_sites(shared_history):
    """The agents told 15,000 MB of a t4; that of a type on which no job ran is from the catalogue."""
    store = open_store(shared_history)
    found = recorded_history((store.round(number) for number in store.round_numbers()), ())
    learned = Learned(found.pairs, "here", gpu_memory_mb=found.gpu_memory_mb)
    shared = shared_by(["gandiva"], SharingOptions(None, "", False, "", None), ["t4", "a100"], learned)
    assert shared is not None
    assert shared.sharers(found.workload).gpu_memory_mb == {"t4": 15_000, "a100": 38_146}


def test_what_is_assumed_is_said_aloud(recorded):
    result = whatif(recorded[0], "--policy", "gandiva", "--assume-utilisation", 0.6)
    assert "The utilisation of 6 of 6 jobs is unknown" in result.stderr
    assert "they are assumed to use 60% of a GPU" in result.stderr
    assert "The memory of 6 of 6 jobs is unknown" in result.stderr
    assert "(user/j0, user/j1, user/j2, user/j3, user/j4 and 1 more)" in result.stderr
    assert "'recorded' shows what really happened" in result.stderr
    assert "6 of 6 jobs also run on fewer GPUs. gandiva gives each the maximum of its job spec." in result.stderr


def test_a_store_without_rounds_is_told(tmp_path):
    open_store(tmp_path, writer=True).close()
    with pytest.raises(ConfigError, match="the store has no rounds"):
        whatif(tmp_path)
    by_variable = CliRunner(env={"PENSTOCK_STORE": str(tmp_path)}).invoke(make_app(), ["simulate", "whatif"])
    assert "the store has no rounds" in str(by_variable.exception)
