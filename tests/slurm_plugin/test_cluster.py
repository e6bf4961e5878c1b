"""What the cluster makes of Slurm's answers, with a gateway that says what it is told to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from penstock_profiles.wire import Checkpointed, ControlMessage, Ended, Report, Started, reports_file
from penstock_scheduler.jobs import report_quota
from penstock_scheduler.model import Hold, Placement, Progress, Share, Start, StopCode, UnknownValue
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import (
    ControllerAway,
    Refused,
    SlurmError,
    SlurmFeatures,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    SlurmRun,
    Unknown,
    Unread,
    Write,
)
from penstock_slurm.gateway.abilities import RELEASES, Release, shown
from penstock_slurm.gateway.parse_jobs import parse_jobs
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.gateway.test_parse import HELD, MARKS, answer
from tests.slurm_plugin.gateway.test_unknown_values import with_field
from tests.slurm_plugin.test_site import slurm_job

SPEC = '{"penstock": {"max_gpus": 4}}'


class Told:
    """A gateway with two nodes: n0 in `gpu`, n1 in `debug`. It does nothing that it is asked for."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.listed: list[SlurmJob] = []
        self.ended: list[SlurmJob] = []
        self.asked = 0
        self.used: dict[str, int] = {}
        """Node -> GPUs in use."""
        self.words: dict[str, set[str]] = {}
        """Node -> its state, if it is not idle."""
        self.known: dict[str, bool | Exception] = {}
        """Job -> whether Slurm has it, or the error, for a question about this job alone."""
        self.checked: list[str] = []
        self.lost: tuple[Unread, ...] = ()
        self.written: list[Write] = []
        self.array_limits: dict[int, int] = {}
        self.kept: list[tuple[str, ...]] = []
        """The nodes of the reservation for moves, each time that it changes."""
        self.goes_away_at: str | None = None
        """The job at whose command Slurm goes away."""

    def version(self) -> tuple[int, int]:
        return (22, 5)

    def features(self) -> SlurmFeatures:
        return SlurmFeatures("loop")

    def partitions(self) -> tuple[SlurmPartition, ...]:
        return tuple(
            SlurmPartition(
                name, (node,), name not in self.down, name == "gpu", None, state="DOWN" if name in self.down else "UP"
            )
            for name, node in (("gpu", "n0"), ("debug", "n1"))
        )

    def nodes(self) -> tuple[SlurmNode, ...]:
        return tuple(
            SlurmNode(
                node,
                {"t4": 4},
                {"t4": self.used.get(node, 0)},
                frozenset(self.words.get(node, {"IDLE"})),
                (name,),
                16,
                0,
                64_000,
                0,
            )
            for name, node in (("gpu", "n0"), ("debug", "n1"))
        )

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        self.asked += finished
        return (*self.listed, *(self.ended if finished else ()))

    def records(self, job_id: str) -> tuple[SlurmJob, ...]:
        return tuple(job for job in (*self.listed, *self.ended) if job.id == job_id)

    def reservations(self) -> tuple[()]:
        return ()

    def set_admin_comment(self, job_id: str, text: str) -> None:
        del job_id, text

    def keep_nodes(self, nodes: Sequence[str], *, changes: bool) -> None:
        if changes != bool(self.kept and self.kept[-1]):
            raise Refused("it exists, or does not", command="scontrol")
        self.kept.append((*nodes,))

    def keep_no_nodes(self) -> None:
        if not (self.kept and self.kept[-1]):
            raise Refused("it does not exist", command="scontrol")
        self.kept.append(())

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        self.written += writes
        jobs = [write.job_id for write in writes]
        left = jobs.index(self.goes_away_at) if self.goes_away_at in jobs else len(jobs)
        return (None,) * left + (ControllerAway("connection refused", command="scontrol"),) * (len(jobs) - left)

    def array_limit(self, job_id: str) -> int | None:
        return self.array_limits.get(int(job_id.partition("_")[0]))

    def gpus_held(self, job_id: str) -> int | None:
        return None

    def unread(self) -> tuple[Unread, ...]:
        return self.lost

    def knows(self, job_id: str) -> bool:
        self.checked.append(job_id)
        found = self.known.get(job_id, False)
        if isinstance(found, Exception):
            raise found
        return found


def pending(partition: str, **fields: object) -> SlurmJob:
    asked = {"gpus_per_node": 1, "node_count": 1, "tasks": 1, "cpus": 1, "cpus_per_task": 1, "gpu_type": None}
    known = {"state": "PENDING", "comment": SPEC, "partition": (partition,), "requeue": True, "priority": 0}
    known |= dict.fromkeys(("admin_comment", "licenses", "dependency", "reservation"), "")
    known |= dict.fromkeys(("het_job_id", "start_s", "end_s", "deadline_s"))
    return dataclasses.replace(slurm_job("7"), **(asked | known | fields))  # type: ignore[arg-type]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def cluster(told: Told, tmp_path: Path) -> SlurmCluster:
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
    return SlurmCluster(told, told, Spool(tmp_path / "spool"), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["NOT_RESPONDING", "UNKNOWN", "DOWN"])
def test_no_job_is_stopped_on_a_node_that_cannot_be_asked(
    told: Told, cluster: SlurmCluster, tmp_path: Path, word: str
) -> None:
    """Neither by a command nor by a request to save. When the node answers, the stop goes on."""
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), priority=9, start_s=10.0)]
    told.words = {"n0": {"MIXED", word}}
    cluster.observe()
    (outcome,) = cluster.apply([Hold("7", 1)])
    assert (outcome.progress, outcome.text) == (
        Progress.UNDER_WAY,
        "waits until its nodes respond, or Slurm gives them up",
    )
    assert (told.written, Spool(tmp_path / "spool").control("7")) == ([], None)
    told.words = {}
    cluster.observe()
    cluster.apply([Hold("7", 1)])
    assert [each.kind for each in told.written] == ["requeue_hold"]


@pytest.mark.parametrize(("partition", "node"), [("gpu", "n0"), ("debug", "n1")], ids=["on site", "cloud"])
def test_no_job_is_requeued_from_nodes_that_boot(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str, node: str
) -> None:
    """Slurm 22.05.8 would start it without GPUs the next time, and count them as used from then on."""
    monkeypatch.setattr(told, "features", lambda: SlurmFeatures("loop", resume_timeout_s=600.0))
    settings = SlurmSettings(partitions=("gpu",), cloud_partition="debug", spool_dir=tmp_path / "spool")
    cluster = SlurmCluster(told, told, Spool(tmp_path / "spool"), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]
    job = pending(partition, state="CONFIGURING", nodes=(node,), required_nodes=(node,), priority=9, start_s=10.0)
    told.listed, told.words = [job], {node: {"MIXED", "POWERING_UP", "CLOUD"}}
    Spool(tmp_path / "spool").tell(ControlMessage(job_id="7", epoch=2, round=0, submitted_to="gpu"), job.uid)
    cluster.observe()
    (outcome,) = cluster.apply([Hold("7", 1)])
    assert outcome.text == "waits until its nodes respond, or Slurm gives them up"
    assert told.written == []
    told.listed, told.words = [dataclasses.replace(job, state="RUNNING")], {}
    cluster.observe()
    cluster.apply([Hold("7", 1)])
    assert [each.kind for each in told.written] == ["requeue_hold"]


@pytest.mark.parametrize(("ends_s", "pause_s"), [(0.5, 0.75), (1.5, 0.0), (30.0, 1.25)])
def test_the_next_run_begins_a_second_after_slurm_has_revoked_the_credential(
    told: Told, tmp_path: Path, ends_s: float, pause_s: float
) -> None:
    """Slurm does so when it begins to end the run, and may do so again if that takes long."""
    settings = SlurmSettings(partitions=("gpu",), spool_dir=tmp_path / "spool").model_copy(
        update={"credential_pause_s": 1.2}
    )
    clock = SimulatedClock()
    cluster = SlurmCluster(told, told, Spool(tmp_path / "spool"), clock, settings, lambda spec: None)  # type: ignore[arg-type]
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), priority=9, start_s=10.0)]
    cluster.observe()
    cluster.apply([Hold("7", 1)])
    clock.sleep(ends_s)
    told.listed = [pending("gpu", restarts=1)]
    waited_s = 0.0
    while True:
        cluster.observe()
        cluster.apply([Start("7", 2, Placement("t4", "gpu", (Share("n0", 1),)))])
        if [each.kind for each in told.written] != ["requeue_hold"]:
            break
        clock.sleep(0.25)
        waited_s += 0.25
    assert waited_s == pause_s


def partitions_of(cluster: SlurmCluster) -> Iterable[str]:
    (job,) = cluster.observe().jobs
    return job.partitions


def test_a_job_keeps_its_partition_while_that_is_down(told: Told, cluster: SlurmCluster) -> None:
    """It stays first, for its policy and its rules, and so do its nodes; the partition says that nothing starts in it."""
    told.listed = [pending("debug")]
    assert partitions_of(cluster) == ("debug", "gpu")
    told.down = {"debug"}
    assert partitions_of(cluster) == ("debug", "gpu")
    state = cluster.observe()
    assert {node.name: node.partitions for node in state.nodes} == {"n0": ("gpu",), "n1": ("debug",)}
    assert {each.name: each.may_start for each in state.partitions} == {"gpu": True, "debug": False}
    cluster.apply([Start("7", 1, Placement("t4", "gpu", (Share("n0", 1),)))])
    told.listed = [pending("gpu")]  # where it was sent
    assert partitions_of(cluster) == ("debug", "gpu")
    told.down = {"gpu"}
    assert partitions_of(cluster) == ("debug", "gpu")
    assert {each.name: each.may_start for each in cluster.observe().partitions} == {"gpu": False, "debug": True}


def test_the_elements_of_an_array_are_trials_of_one_search_if_their_user_says_so(
    told: Told, cluster: SlurmCluster
) -> None:
    """Of another array, of another search; outside of an array it is a name as any other."""
    comment = '{"penstock": {"max_gpus": 4, "trial_group": "array"}}'
    for array, element in ((12, 1), (12, 2), (15, 1), (None, None)):
        name = "9" if array is None else f"{array}_{element}"
        ids = {"id": name, "number": array or 9, "array_job_id": array, "array_task_id": element}
        told.listed.append(pending("gpu", comment=comment, **ids))
    assert {job.id: job.spec.trial_group for job in cluster.observe().jobs} == {
        "12_1": "array 12",
        "12_2": "array 12",
        "15_1": "array 15",
        "9": "array",
    }


def test_a_job_that_exceeded_its_memory_is_logged_once_and_one_that_is_queued_again_is_forgotten(
    told: Told, cluster: SlurmCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An observation asks for ended jobs at most once, and not at all once nothing is left to learn about them."""
    Spool(tmp_path / "spool").tell(
        ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=1, memory_mb=500, holds=0), 0
    )
    ending, killed = pending("gpu", state="COMPLETING"), pending("gpu", state="OUT_OF_MEMORY")
    for listed, ended, logged in (([pending("gpu")], [], 0), ([], [killed], 1)):
        told.listed, told.ended = [pending("gpu")], []
        cluster.observe()
        told.listed, told.ended = [], [ending]
        cluster.observe()
        told.listed, told.ended, told.asked = listed, ended, 0
        cluster.observe()
        assert told.asked == 1
        assert [record.getMessage() for record in caplog.records].count("job exceeded its memory") == logged
        cluster.reports()
        told.asked = 0
        cluster.observe()
        assert told.asked == 0


def test_a_job_that_no_observation_has_shown_running_may_have_exceeded_its_memory(
    told: Told, cluster: SlurmCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Spool(tmp_path / "spool").tell(
        ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=1, memory_mb=500, holds=0), 0
    )
    told.listed = [pending("gpu")]
    cluster.observe()
    told.listed, told.ended = [], [pending("gpu", state="OUT_OF_MEMORY")]
    cluster.observe()
    assert [record.getMessage() for record in caplog.records].count("job exceeded its memory") == 1


def test_what_a_job_says_while_slurm_stops_it_is_read(told: Told, cluster: SlurmCluster, tmp_path: Path) -> None:
    """Its user cancels it. Penstock no longer places it, but it still saves, reports that, and reports its end."""
    spool = tmp_path / "spool"
    Spool(spool).tell(ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=1), os.geteuid())
    bodies = (
        Started(gpu_type="t4", gpu_ids={}),
        Checkpointed(progress=9, seconds=1),
        Ended(outcome="stopped", progress=9),
    )
    held = {"nodes": ("n0",), "uid": os.geteuid()}
    for number, (state, body) in enumerate(zip(("RUNNING", "COMPLETING", "COMPLETING"), bodies, strict=True)):
        told.listed = [pending("gpu", state=state, **held)]
        cluster.observe()
        with reports_file(spool, "7", 1).open("a") as file:
            report = Report(job_id="7", epoch=1, sequence=number, time_s=1.0, body=body)
            file.write(report.model_dump_json() + "\n")
        assert [each.body for each in cluster.reports()] == [body]
    told.listed, told.ended = [], [pending("gpu", state="CANCELLED", **held)]
    cluster.observe()
    with reports_file(spool, "7", 1).open("a") as file:
        file.write(report.model_dump_json() + "\n")
    assert len(cluster.reports()) == 1
    with reports_file(spool, "7", 1).open("a") as file:
        file.write(report.model_dump_json() + "\n")
    assert cluster.reports() == [], "nothing is read of a job that is gone"


def test_a_job_that_floods_the_spool_is_cut_and_its_user_told(
    told: Told, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for what was there before penstockd started: an earlier one has read it, and the job may be days old."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(told, "set_admin_comment", lambda job_id, text: said.append((job_id, text)))
    monkeypatch.setattr(report_quota, "BURST_BYTES", 2000)
    spool = tmp_path / "spool"
    Spool(spool).tell(ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=1, holds=0), os.geteuid())
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), priority=9, start_s=10.0, uid=os.geteuid())]
    cluster.observe()
    body = Checkpointed(progress=1.0, seconds=0.1)
    reports = [Report(job_id="7", epoch=1, sequence=number, time_s=1.0, body=body) for number in range(2000)]
    for flood in (reports[:1000], reports[1000:]):
        assert said == []
        with reports_file(spool, "7", 1).open("a") as file:
            file.write("".join(each.model_dump_json() + "\n" for each in flood))
        kept = cluster.reports()
        assert len(kept) < 40
        if flood[0].sequence == 0:
            assert len(kept) > 1
            assert kept[-1] == flood[-1], "the newest of its kind"
    ((job, text),) = said
    assert (job, report_quota.TEXT in text) == ("7", True)


@pytest.mark.parametrize(("ends_in_s", "over"), [(-10.0, True), (2.0, True), (365 * 86_400.0, False)])
def test_a_run_that_shows_its_limit_as_its_end_is_not_over(
    told: Told, cluster: SlurmCluster, ends_in_s: float, over: bool
) -> None:
    """As Slurm does while it requeues a job whose node has failed; a job without a limit has one of a year."""
    now_s = SimulatedClock().now_s()
    fields = {"state": "NODE_FAIL", "nodes": ("n0",), "start_s": now_s - 30, "end_s": now_s + ends_in_s}
    told.listed = [pending("gpu")]
    cluster.observe()
    told.listed, told.ended = [], [pending("gpu", **fields)]
    assert [run.job for run in cluster.observe().ended] == (["7"] if over else [])


def test_a_job_that_is_to_have_gpus_of_its_own_again_is_ours_until_slurm_has_given_them(
    told: Told, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """It ran without GPUs of Slurm's. The daemon dies when the spool has the new start and Slurm has not."""
    spool = Spool(tmp_path / "spool")
    told.listed = [pending("gpu", gpus_per_node=None)]
    spool.tell(ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=1, shares=True, holds=0), 0)
    cluster.observe()
    cluster.apply([Start("7", 2, Placement("t4", "gpu", (Share("n0", 2),)))])
    control = Spool(tmp_path / "spool").control("7")
    assert control is not None
    assert control.gpus == 2
    state = cluster.observe()
    assert state.refused == ()
    assert [job.id for job in state.jobs] == ["7"]


@pytest.mark.parametrize(("shares", "gpus"), [(True, 2), (False, 0)])
def test_the_accounts_of_a_run_without_gpus_of_slurms(
    told: Told, cluster: SlurmCluster, tmp_path: Path, shares: bool, gpus: int
) -> None:
    """It had those that it was sent to, if it shared; else Slurm has started it without its GPUs, and it had none."""
    told.features = lambda: SlurmFeatures("loop", counts_gpus=True)  # type: ignore[method-assign]
    told.runs = lambda jobs, since_s: (SlurmRun("7", 10.0, 20.0, ("n0",), 0),)  # type: ignore[attr-defined]
    Spool(tmp_path / "spool").tell(ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=2, shares=shares), 0)
    assert [run.held.gpus for run in cluster.accounts(["7"], 0.0)] == [gpus]


def test_what_slurm_says_in_unknown_words_concerns_that_one_job_alone(told: Told, cluster: SlurmCluster) -> None:
    """It is refused with Slurm's text. Another job is placed as before, and the values are reported with their records."""
    strange = pending("gpu", state="DREAMING", unknown=(Unknown("State", "DREAMING"),))
    told.listed = [strange, dataclasses.replace(pending("gpu"), id="8", number=8)]
    seen = cluster.observe()
    (refusal,) = seen.refused
    assert refusal.job == "7"
    assert "Slurm says State=DREAMING of it" in refusal.text
    assert "`penstock slurm check`" in refusal.text
    assert [job.id for job in seen.jobs] == ["8"]
    assert seen.unknown == (UnknownValue("job", "State", "State=DREAMING", ("7",)),)


@pytest.mark.parametrize("each", RELEASES, ids=lambda each: shown(each.since))
def test_only_a_job_with_exclusive_is_refused_for_it_in_the_words_of_every_release(
    told: Told, cluster: SlurmCluster, each: Release
) -> None:
    """On 26.05 the field that meant --exclusive before says the same of every ordinary job."""
    for word, whole_nodes in each.whole_nodes.items():
        (job,) = parse_jobs(answer(with_field(HELD, each.whole_nodes_field, word, each)), MARKS, each)
        told.listed = [pending("gpu", exclusive=job.exclusive, unknown=job.unknown)]
        seen = cluster.observe()
        assert [job.id for job in seen.jobs] == ([] if whole_nodes else ["7"]), word
        text = "it requests whole nodes (--exclusive), but Penstock allocates GPUs; submit it without --exclusive"
        assert [refusal.text for refusal in seen.refused] == ([text] if whole_nodes else []), word


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_that_slurm_has_started_without_its_gpus_is_stopped_with_a_reason_for_its_history(
    told: Told, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """A first run may lack them too, after a restart of slurmctld."""
    monkeypatch.setattr(told, "gpus_held", lambda job_id: 0)
    monkeypatch.setattr(told, "requeue_hold", lambda job_id: None, raising=False)
    Spool(tmp_path / "spool").tell(ControlMessage(job_id="7", epoch=2, round=5, nodes=1, gpus=1, holds=0), 0)
    runs = {"state": "RUNNING", "nodes": ("n0",), "priority": 9, "restarts": restarts, "start_s": 10.0}
    told.listed = [pending("gpu", **runs)]
    for _ in range(2):  # a run is checked if the job was known before
        (job,) = cluster.observe().jobs
    assert job.allocation is None
    (outcome,) = cluster.apply(())
    assert (outcome.action, outcome.progress) == (Hold("7", 5), Progress.DONE)
    assert outcome.stop is not None
    assert outcome.stop.code is StopCode.NO_GPUS
    assert "Slurm started it without its GPUs" in outcome.stop.text


def test_what_was_done_before_slurm_went_away_is_told(told: Told, cluster: SlurmCluster) -> None:
    """The history of a job that was stopped then has the stop and its reason."""
    running = {"state": "RUNNING", "nodes": ("n0",), "priority": 9}
    told.listed = [pending("gpu", id=name, number=int(name), **running) for name in ("7", "8")]
    cluster.observe()
    told.goes_away_at = "8"
    first, second = cluster.apply([Hold("7", 1), Hold("8", 1)])
    assert first.text.endswith("leaves its GPUs")
    assert second.progress is Progress.UNDER_WAY
    assert second.text.startswith("will be tried again: ")
    told.goes_away_at = "7"
    with pytest.raises(ClusterAway, match="connection refused"):
        cluster.apply([Hold("7", 1), Hold("8", 1)])
