"""What the daemon orders of agents and of the GPU reservation, look by look: with a Slurm that says what it is told to, and
no agent."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock_profiles.colocation import Colocation
from penstock_scheduler.cli.doctor import agents_in
from penstock_scheduler.clock import WallClock
from penstock_scheduler.errors import ClusterAway, ConfigError
from penstock_scheduler.model import Job, JobSpec, JobUse, Limit, Pack, PackSeen, Phase, SharedGpus
from penstock_scheduler.pairs import Pairs
from penstock_scheduler.settings import load_settings
from penstock_scheduler.sharing.messages import (
    CarriedGroup,
    CarriedJob,
    Contained,
    NodeOrder,
    NodeStatus,
    NumberedPack,
    XidSeen,
    order_file,
    status_file,
)
from penstock_scheduler.sharing.slices import next_packs
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.spool import Spool
from penstock_slurm import agents as agents_module
from penstock_slurm import open_cluster
from penstock_slurm.agents import SlurmAgents
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway, SlurmJob, SlurmNode, TimedOut
from penstock_slurm.gpu_reservation import CHECKS, NAME, GpuReservations
from penstock_slurm.settings import SlurmSettings
from tests.scheduler.builders import job, on, snapshot
from tests.slurm_plugin.boards import TWO_PAIRS
from tests.slurm_plugin.test_cluster import Told, pending


class Commands:
    """Slurm's commands, as far as the GPU reservation uses them: what was asked, and answers from a table."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.indexes: dict[str, tuple[int, ...]] = {}
        self.error: Exception | None = None

    def gpu_indexes(self, job_id: str) -> tuple[int, ...]:
        self.asked.append(("gpu_indexes", job_id))
        if self.error is not None:
            raise self.error
        return self.indexes.get(job_id, ())

    def submit_placeholder(self, name: str, node: str, partition: str, note: str, after: int | None) -> str:
        self.asked.append(("submit_placeholder", node, after))
        return str(900 + len(self.asked))

    def cancel(self, job_id: str) -> None:
        self.asked.append(("cancel", job_id))

    def set_comment(self, job_id: str, note: str) -> None:
        self.asked.append(("set_comment", job_id))

    def no_time_limit(self, job_id: str) -> None:
        self.asked.append(("no_time_limit", job_id))


class Site:
    """One node, `n0`, of four GPUs, and jobs of ours there."""

    def __init__(self, spool: Path) -> None:
        self.spool, self.commands, self.clock = spool, Commands(), SimulatedClock()
        self.begin()

    def begin(self) -> None:
        """As a daemon that starts."""
        self.agents = SlurmAgents(GpuReservations(self.commands), self.spool, self.clock)  # type: ignore[arg-type]

    def told(
        self,
        *jobs: CarriedJob,
        order: int = 0,
        history: str = "h",
        news: int = 0,
        links: tuple[tuple[int, ...], ...] = (),
        groups: Sequence[tuple[SharedGpus, Sequence[Pack]]] = (),
    ) -> None:
        """Its agent's word, with so many packs, containments and errors of GPUs, the last three of which it remembers.

        Args:
            groups: each with the packs of it that run now.
        """
        numbers = range(max(news - 2, 1), news + 1)
        status = NodeStatus(
            node="n0",
            order=order,
            time_s=self.clock.now_s(),
            history=history,
            groups=tuple(CarriedGroup(shared=shared, running=tuple(running)) for shared, running in groups),
            jobs=jobs,
            packs=tuple(NumberedPack(number=number, seen=PackSeen(("7", "8"), "t4", (0.8, 0.7))) for number in numbers),
            contained=tuple(
                Contained(number=number, job="7", time_s=1.0, cause="died", text=f"{number}", killed=False)
                for number in numbers
            ),
            xids=tuple(XidSeen(number=number, time_s=1.0, device=0, xid=79) for number in numbers),
            links=links,
        )
        path = status_file(self.spool, "n0")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(status.model_dump_json())

    def look(self, *found: tuple[Job, SlurmJob], others: tuple[SlurmJob, ...] = (), used: int = 0) -> None:
        """A look at jobs of ours, of which those without GPUs are cleared, and at others: placeholder jobs, and jobs that
        leave."""
        node = SlurmNode("n0", {"t4": 4}, {"t4": used}, frozenset({"IDLE"}), ("gpu",), 16, 0, 64_000, 0)
        self.agents.reservations.saw([*(each for _, each in found), *others])
        cleared = {each.id for each, slurm_job in found if slurm_job.gpus_per_node is None}
        jobs, slurm_jobs = {each.id: each for each, _ in found}, {each.id: each for _, each in found}
        self.agents.saw([node], jobs, slurm_jobs, cleared, ["gpu"], {"n0": "t4"})

    def order(self) -> NodeOrder:
        return NodeOrder.model_validate_json(order_file(self.spool, "n0").read_bytes())


def runs(number: str, gpus: int | None = 1, **fields: object) -> tuple[Job, SlurmJob]:
    """A job that runs on `n0`; with no GPUs of Slurm's if None."""
    here = {"id": number, "number": int(number), "state": "RUNNING", "nodes": ("n0",), "gpus_per_node": gpus}
    return job(number, phase=Phase.RUNNING, allocation=on("t4", n0=gpus or 1)), pending("gpu", **here | fields)


def placeholder(number: str, node: str = "n0") -> SlurmJob:
    fields = {"id": number, "number": int(number), "name": NAME, "uid": os.geteuid(), "comment": json.dumps({})}
    return pending("gpu", **fields | {"state": "RUNNING", "nodes": (node,)})


def carried(number: str, *devices: int, state: str = "running", kind: str = "k") -> CarriedJob:
    return CarriedJob(job=number, state=state, devices=devices, use=JobUse(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(("links", "first", "second"), [(TWO_PAIRS, (0, 2), (1, 3)), ((), (0, 1), (2, 3))])
def test_jobs_get_reserved_gpus_that_are_connected(
    site: Site, links: tuple[tuple[int, ...], ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """Two of two GPUs each that begin alone on a node whose GPUs 0 and 2 share a switch, as 1 and 3 do. Once they are bound they
    stay where they are, whatever the driver says then."""
    site.commands.indexes = {"20": (0,), "21": (1,), "22": (2,), "23": (3,)}
    placeholders = tuple(map(placeholder, site.commands.indexes))
    found = [
        (dataclasses.replace(each, allocation=on("t4", n0=2)), slurm_job)
        for each, slurm_job in (runs("7", None), runs("8", None))
    ]

    def allotted() -> dict[str, tuple[int, ...]]:
        site.look(*found, others=placeholders, used=4)
        site.agents.share(())
        return {each.shared.jobs[0]: each.devices for each in site.order().groups}

    site.told(*(carried(number, state="waiting") for number in ("7", "8")), links=links)
    for _ in range(2):
        assert allotted() == {"7": first, "8": second}
    site.begin()
    assert allotted() == {"7": first, "8": second}
    site.told(carried("7", 0, 1), carried("8", 2, 3), links=links)
    assert allotted() == {"7": (0, 1), "8": (2, 3)}


def test_a_group_that_lacks_a_gpu_gets_one_that_goes_with_its_others(site: Site) -> None:
    """One of its two jobs is bound to GPU 3, which shares a switch with 1."""
    site.commands.indexes = {"20": (0,), "21": (1,), "23": (3,)}
    site.told(carried("7", 3), carried("8", state="waiting"), links=TWO_PAIRS)
    site.look(runs("7", None), runs("8", None), others=tuple(map(placeholder, site.commands.indexes)), used=3)
    site.agents.share([SharedGpus("n0", 2, (Pack(("7",)), Pack(("8",))))])
    assert [each.devices for each in site.order().groups] == [(1, 3)]


def test_clients_of_mps_start_anew_when_their_group_comes_to_take_turns(site: Site) -> None:
    """They are not suspended, so the third would wait until they end. As long as the packs fit they stay, and so do others."""
    clients = [carried(number, 0).model_copy(update={"mps": True}) for number in ("1", "2")]
    found = [runs(number, None) for number in ("1", "2", "3")]
    site.told(*clients, carried("3", 1))
    site.look(*found, others=(placeholder("90"), placeholder("91")), used=2)
    packed = Pack(("1", "2"))
    site.agents.share([SharedGpus("n0", 2, (packed, Pack(("3",))))])
    assert site.agents.misplaced == set()
    site.agents.share([SharedGpus("n0", 1, (packed, Pack(("3",))))])
    assert site.agents.misplaced == {"1", "2"}


def group(*jobs: str) -> SharedGpus:
    return SharedGpus("n0", 1, tuple(Pack((each,)) for each in jobs))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "spool")


def test_a_site_without_agents_is_left_as_it_is(tmp_path: Path) -> None:
    """A job on one node: nothing is asked of Slurm for it, nothing is in the spool for agents, and the doctor misses none."""
    told, commands, spool = Told(), Commands(), Spool(tmp_path / "spool")
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=spool.folder)
    clock = SimulatedClock()
    sharing = SlurmAgents(GpuReservations(commands), spool.folder, clock)  # type: ignore[arg-type]
    cluster = SlurmCluster(told, spool, clock, settings, lambda spec: None, sharing=sharing)  # type: ignore[arg-type]
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), restarts=0)]
    for _ in range(2):
        assert [each.phase for each in cluster.observe().jobs] == [Phase.RUNNING]
        cluster.apply(())
    assert commands.asked == []
    assert agents_in(spool.folder, clock.now_s()) == ([], [])


def test_gpus_of_slurms_are_told_where_there_is_an_agent(site: Site) -> None:
    site.told()
    site.commands.indexes = {"7": (2,)}
    site.look(runs("7"))
    site.agents.share(())
    assert [each.own_devices for each in site.order().jobs] == [(2,)]


@pytest.mark.parametrize("restarted", [False, True])
def test_the_gpus_of_a_job_whose_processes_may_live_stay_reserved(site: Site, restarted: bool) -> None:
    """It is bound to GPU 0, was cancelled, and is COMPLETING: nobody else gets it before Slurm says that it is gone."""
    site.commands.indexes = {"20": (0,)}
    site.told(carried("7", 0))
    site.look(runs("7", None), others=(placeholder("20"),), used=1)
    site.agents.share(())
    if restarted:
        site.begin()
    else:
        site.told()  # the agent, of an order without it
    leaving = runs("7", None, state="COMPLETING")[1]
    new = job("8"), pending("gpu", id="8", number=8)
    together = group("8", "9")
    other = job("9"), pending("gpu", id="9", number=9)
    for _ in range(2):
        site.look(new, other, others=(placeholder("20"), leaving), used=1)
        site.agents.share([together])
    assert ("cancel", "20") not in site.commands.asked
    assert [each.devices for each in site.order().groups if "8" in each.shared.jobs] == [()]
    site.told()
    site.look(new, other, others=(placeholder("20"),), used=1)
    site.agents.share([together])
    assert [each.devices for each in site.order().groups] == [(0,)]


@pytest.mark.parametrize("lost", ["memory", "agent"])
def test_a_job_that_slurm_is_about_to_start_without_gpus_keeps_reservation_and_order(site: Site, lost: str) -> None:
    site.commands.indexes = {"20": (0,)}
    site.told()
    waits = job("7"), pending("gpu", id="7", number=7)
    site.look(waits)
    assert site.agents.takes("7", "n0", 1)
    site.agents.share(())
    assert [each.job for each in site.order().jobs] == ["7"]
    if lost == "memory":
        site.begin()
    else:
        site.clock.sleep(100.0)
    fields = {"id": "7", "number": 7, "gpus_per_node": None, "required_nodes": ("n0",), "priority": 9}
    sent = job("7", phase=Phase.STARTING, allocation=on("t4", n0=1)), pending("gpu", **fields)
    for _ in range(2):
        site.look(sent, others=(placeholder("20"),), used=1)
        site.agents.share(())
    assert [each.job for each in site.order().jobs] == ["7"]
    assert ("cancel", "20") not in site.commands.asked


def test_a_daemon_that_starts_knows_what_the_one_before_has_promised(site: Site) -> None:
    """7 may be bound to GPU 0 or 1 by the order; its agent has not said. Then no placeholder job goes, though one would do."""
    site.commands.indexes = {"20": (0,), "21": (1,)}
    site.told()
    wide = SharedGpus("n0", 2, (Pack(("7",)), Pack(("8",))))
    site.look(runs("7", None), runs("8", None), others=(placeholder("20"), placeholder("21")), used=2)
    site.agents.share([wide])
    assert [each.devices for each in site.order().groups] == [(0, 1)]
    site.begin()
    site.told(carried("7", 0), carried("8"))
    site.look(runs("7", None), runs("8", None), others=(placeholder("20"), placeholder("21")), used=2)
    site.agents.share([group("7", "8")])
    assert ("cancel", "21") not in site.commands.asked


def test_slurm_that_does_not_answer_costs_one_command_a_look(site: Site) -> None:
    site.told()
    site.commands.error = TimedOut("no answer in 15 s", command="scontrol show job")
    many = [runs(str(number)) for number in range(7, 12)]
    for look in (1, 2):
        site.look(*many)
        assert len(site.commands.asked) == look
        with pytest.raises(ClusterAway, match="no answer"):
            site.agents.share(())
    site.commands.error = None
    site.look(*many)
    site.agents.share(())


def test_notes_are_not_tried_one_by_one_while_slurm_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, spool, clock, asked = Told(), Spool(tmp_path / "spool"), SimulatedClock(), []

    def away(job_id: str, text: str) -> None:
        asked.append(job_id)
        raise TimedOut("no answer in 15 s", command="scontrol update")

    told.set_admin_comment = away  # type: ignore[attr-defined]
    sharing = SlurmAgents(GpuReservations(Commands()), spool.folder, clock)  # type: ignore[arg-type]
    monkeypatch.setattr(sharing, "note", lambda job_id: {"node": "n0"})
    settings = SlurmSettings(partitions=("gpu",), spool_dir=spool.folder)
    cluster = SlurmCluster(told, spool, clock, settings, lambda spec: None, sharing=sharing)  # type: ignore[arg-type]
    told.listed = [runs("7")[1], runs("8")[1]]
    cluster.observe()
    with pytest.raises(ClusterAway, match="no answer"):
        cluster.apply(())
    assert asked == ["7"]


def test_a_daemon_that_starts_asks_for_a_few_jobs_a_look(site: Site) -> None:
    site.told()
    many = [runs(str(number)) for number in range(7, 7 + CHECKS + 3)]
    for asked in (CHECKS, CHECKS + 3, CHECKS + 3):
        site.look(*many)
        assert len(site.commands.asked) == asked


def test_a_commands_time_out_ends_the_look_at_the_reservations(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: object) -> str:
        raise TimedOut("no answer in 15 s", command="sbatch")

    site.told()
    monkeypatch.setattr(site.commands, "submit_placeholder", late)
    site.look(runs("7", None))
    with pytest.raises(ClusterAway, match="no answer"):
        site.agents.share(())


def test_a_job_starts_when_its_agent_is_ready_for_this_run(site: Site) -> None:
    """What the agent says of the run before, or what it is bound to, is not that."""
    site.commands.indexes = {"20": (0,)}
    for told, ready in ((carried("7", 0), False), (carried("7"), False), (carried("7", state="waiting"), True)):
        site.told(told)
        site.look((job("7"), pending("gpu", id="7", number=7)), others=(placeholder("20"),), used=1)
        site.agents.takes("7", "n0", 1)
        site.agents.share(())
        assert (site.agents.keeps_back("7", "n0") == "") == ready


def test_a_folder_that_cannot_be_written_does_not_stop_the_site(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    (site.spool).mkdir()
    (site.spool / "agents").write_text("no folder")
    site.look(runs("7", None))
    site.agents.share(())
    assert "cannot write an order" in caplog.text


def test_a_status_that_cannot_be_read_for_once_stands_until_it_is_old(site: Site) -> None:
    site.commands.indexes = {"20": (2,), "21": (3,)}
    site.told(carried("7", 3))
    found = (runs("7", None),)
    for lost in (False, True):
        if lost:
            status_file(site.spool, "n0").unlink()
        site.look(*found, others=(placeholder("20"), placeholder("21")), used=2)
        site.agents.share([group("7")])
        assert [each.devices for each in site.order().groups] == [(3,)]
    site.clock.sleep(100.0)
    site.look(*found, others=(placeholder("20"), placeholder("21")), used=2)
    assert site.agents.keeps_back("7", "n0").startswith("waits for the agent of n0, which does not answer")


def taken(site: Site) -> tuple[int, list[int], list[tuple[str, int]]]:
    """Packs, containments and errors that are told after a look."""
    site.look()
    packs = len(site.agents.sharing().seen)
    contained = [each.number for each in site.agents.take_contained()]
    return packs, contained, [(node, each.number) for node, each in site.agents.take_xids()]


def test_what_agents_saw_and_did_while_no_daemon_was_there_is_told_once(site: Site) -> None:
    site.told(news=1)
    assert taken(site) == (0, [], []), "of what was there before the first daemon nobody knows whether it was told"
    site.told(news=2)
    assert taken(site) == (1, [2], [("n0", 2)])
    site.begin()
    assert taken(site) == (0, [], [])
    site.told(news=4)
    site.begin()
    assert taken(site) == (2, [3, 4], [("n0", 3), ("n0", 4)])
    assert taken(site) == (0, [], [])
    site.begin()
    assert taken(site) == (0, [], [])
    site.told(news=2, history="another")
    site.begin()
    assert taken(site) == (2, [1, 2], [("n0", 1), ("n0", 2)]), "an agent that has lost its state counts anew"


def test_what_a_daemon_has_seen_and_not_told_is_told_by_the_next_one(site: Site) -> None:
    site.told()
    site.look()
    site.told(news=2)
    site.look()
    assert [each.number for each in site.agents.take_contained()] == [1, 2]
    site.begin()
    assert taken(site) == (2, [], [("n0", 1), ("n0", 2)])


def test_a_pack_of_jobs_that_have_ended_meanwhile_is_learned(site: Site) -> None:
    """The agent still has its last order, so it tells of what kind they were, until the daemon tells it another."""
    site.told()
    site.look()
    site.told(carried("7", 0, kind="a"), carried("8", 0, kind="b"), news=1)
    site.begin()
    site.look()
    site.told(news=1)
    site.look()
    pairs = Pairs(Colocation())
    pairs.on(dataclasses.replace(snapshot("t4:1x4", []), sharing=site.agents.sharing()))
    assert (pairs.known.share("t4", "a", "b"), pairs.known.share("t4", "b", "a")) == (0.8, 0.7)
    site.look()
    assert site.agents.sharing().uses == {}


def test_where_nothing_can_be_kept_news_are_told_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    site.told()
    site.look()
    monkeypatch.setattr(agents_module, "write_whole", full)
    site.told(news=1)
    assert taken(site) == (1, [1], [("n0", 1)])
    assert taken(site) == (0, [], [])
    assert "cannot record which events of an agent were taken" in caplog.text


def test_placeholder_jobs_on_unmanaged_nodes_are_named_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        site.look(others=(placeholder("20", "gone"), placeholder("21")))
    (record,) = [each for each in caplog.records if each.getMessage() == "placeholder jobs left behind"]
    assert record.__dict__["jobs"] == "20"


@pytest.mark.parametrize(("there", "found"), [(False, 0), (True, 2)])
def test_a_task_whose_offer_is_withdrawn_sees_no_gpu(tmp_path: Path, there: bool, found: int) -> None:
    """0: it is no sharer, and what it sees is left alone; 2: it is one whose turn never came."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler (Debian: make gcc libslurm-dev)")
    source = Path(__file__).parents[3] / "slurm_plugin" / "spank" / "devices.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "devices.so", source], check=True, timeout=300)
    devices = ctypes.CDLL(str(tmp_path / "devices.so")).penstock_devices
    folder = tmp_path / "7"
    if there:
        folder.mkdir()
        threading.Timer(0.5, folder.rmdir).start()
    text, mps = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
    assert devices(str(tmp_path).encode(), 7, os.geteuid(), 600, text, mps) == found


def node(name: str, *, stand_in: bool) -> SlurmNode:
    state = frozenset({"IDLE"})
    return SlurmNode(name, {"t4": 4}, {}, state, ("all",), 16, 0, 64_000, 0, stand_in=stand_in)


def test_agents_are_refused_where_jobs_cannot_start_without_gpus(tmp_path, monkeypatch, caplog):
    """Later releases than 22.05 need another GRES on nodes that have GPUs: none at all is an error, one that lacks it is not."""
    nodes, version = [node("n0", stand_in=False), node("n1", stand_in=False)], (24, 11)
    monkeypatch.setattr(CliGateway, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(CliGateway, "version", lambda _: version)
    monkeypatch.setattr(CliGateway, "nodes", lambda _: nodes)
    settings = tmp_path / "penstock.toml"
    settings.write_text(f'[slurm]\npartitions = ["all"]\nspool_dir = "{tmp_path}"\nagents = true\n')

    def stands_in() -> bool:
        sharing = open_cluster(load_settings(settings), WallClock(), lambda spec: None).agents
        return sharing is not None and sharing.stand_in

    with pytest.raises(ConfigError, match=r"no node has one for that.*penstock:no_consume:1"):
        stands_in()
    nodes[1] = node("n1", stand_in=True)
    assert stands_in()
    assert [(each.nodes, each.count) for each in caplog.records if hasattr(each, "nodes")] == [("n0", 1)]
    nodes[1], version = node("n1", stand_in=False), (22, 5)
    assert not stands_in()


def test_nobody_shares_on_a_node_on_which_jobs_cannot_start_without_gpus(site: Site) -> None:
    site.agents.stand_in = True
    site.told()
    site.look()
    assert not site.agents.takes("8", "n0", 1)
    assert site.agents.keeps_back("8", "n0") == "waits for n0 to have GRES penstock"
    site.agents.stand_in = False
    assert site.agents.takes("8", "n0", 1)


def bound(number: str, gpus: int | None = None, *, leaves: bool = False, **spec: object) -> tuple[Job, SlurmJob]:
    """One that runs, such as one that was asked to leave."""
    found, slurm_job = runs(number, gpus)
    phase = Phase.STOPPING if leaves else Phase.RUNNING
    return dataclasses.replace(found, phase=phase, spec=JobSpec.model_validate({"max_gpus": 1} | spec)), slurm_job


@pytest.mark.parametrize("own", [False, True], ids=["cleared", "with GPUs of Slurm's"])
@pytest.mark.parametrize(("host", "guest"), [("7", "8"), ("8", "7")])
def test_a_guest_that_leaves_runs_on_beside_its_host_until_it_has_left(
    site: Site, host: str, guest: str, own: bool
) -> None:
    """As it was, with the same limits and the same promise, also in the look before it is asked to leave."""
    site.commands.indexes = {host: (0,), "20": (0,)}
    packed = SharedGpus("n0", 1, (Pack((host, guest), 1, 0, host, (Limit(), Limit(memory_mb=4000))),), 10.0)
    here = carried(host, 0), carried(guest, 0)
    hosts, others = bound(host, 1 if own else None), () if own else (placeholder("20"),)
    site.told(*here)
    site.look(hosts, bound(guest), others=others, used=1)
    site.agents.share([packed])
    before = site.order()
    assert [(each.shared, each.devices) for each in before.groups] == [(packed, (0,))]
    site.told(*here, order=before.number, groups=[(packed, packed.packs)])
    for leaves in (False, True, True):
        site.look(hosts, bound(guest, leaves=leaves), others=others, used=1)
        site.agents.share([])
        assert site.order().groups == before.groups
        assert host not in site.agents.misplaced
    site.look(hosts, others=others, used=1)
    site.agents.share([])
    assert [each.shared.jobs for each in site.order().groups] == ([] if own else [(host,)])


@pytest.mark.parametrize(
    ("spec", "promised", "first"),
    [
        ({}, False, "8"),
        ({}, True, "7"),
        ({"preemptible": False}, False, "7"),
        ({"adaptivity": "fixed"}, False, "7"),
        ({"gpu_class": "guaranteed"}, False, "7"),
    ],
)
def test_one_that_leaves_while_it_is_suspended_saves_next_but_for_who_is_not_suspended_for_it(
    site: Site, spec: dict[str, object], promised: bool, first: str
) -> None:
    """8 is to leave 7's GPU. 7 has had far more of it, and runs on where it is promised its speed, stays, or matters more."""
    site.commands.indexes = {"20": (0,)}
    shared = group("7", "8")
    if promised:
        shared = SharedGpus("n0", 1, (Pack(("7", "8"), guaranteed="7"),))
    ran = [Pack(("7",), guaranteed="7" if promised else None)]
    orders = []
    for _ in range(3):
        site.told(carried("7", 0), carried("8", 0, state="suspended"), groups=[(shared, ran)])
        site.look(bound("7", **spec), bound("8", leaves=True), others=(placeholder("20"),), used=1)
        site.agents.share([])
        (ordered,) = site.order().groups
        shared, orders = ordered.shared, [*orders, ordered]
        served = {pack: 100.0 if pack.jobs == ("7",) else 0.0 for pack in shared.packs}
        ran = [pack for pack in shared.packs if pack.jobs == ("7",)]
        assert [pack.jobs for pack in next_packs(shared.packs, served, 1, ran)] == [(first,)]
    assert orders == orders[:1] * 3, "an agent begins no new slice at each look"


def test_who_comes_in_the_place_of_one_that_leaves_waits_for_it(site: Site) -> None:
    """7 is to be packed with 9 instead of 8, or with 6, which takes turns with both: then 6 goes on taking turns."""
    site.commands.indexes = {"20": (0,)}
    packed = Pack(("7", "8"))
    before = SharedGpus("n0", 1, (packed, Pack(("6",))))
    site.told(carried("6", 0, state="suspended"), carried("7", 0), carried("8", 0), groups=[(before, [packed])])
    found = bound("6"), bound("7"), bound("8", leaves=True)
    new = job("9"), pending("gpu", id="9", number=9)
    site.look(*found, new, others=(placeholder("20"),), used=1)
    site.agents.share([SharedGpus("n0", 1, (Pack(("7", "9")), Pack(("6",))))])
    assert [each.shared for each in site.order().groups] == [before]
    assert [each.job for each in site.order().jobs] == ["6", "7", "8", "9"]
    site.agents.share([SharedGpus("n0", 1, (Pack(("7", "6")),))])
    assert [each.shared for each in site.order().groups] == [before]


def test_two_that_leave_together_run_on_together(site: Site) -> None:
    site.commands.indexes = {"20": (0,)}
    before = SharedGpus("n0", 1, (Pack(("7", "8")), Pack(("9",))))
    site.told(carried("7", 0), carried("8", 0), carried("9", 0, state="suspended"), groups=[(before, before.packs[:1])])
    leave = bound("7", leaves=True), bound("8", leaves=True)
    site.look(*leave, bound("9"), others=(placeholder("20"),), used=1)
    site.agents.share([group("9")])
    (ordered,) = site.order().groups
    assert [pack.jobs for pack in next_packs(ordered.shared.packs, dict.fromkeys(ordered.shared.packs, 0.0), 1)] == [
        ("7", "8")
    ]


def test_a_guaranteed_job_that_comes_waits_for_the_turn_of_one_that_runs_and_leaves(site: Site) -> None:
    """It has had no GPU yet, so nobody suspends it. 8 has its turn alone, beside 9, which waits for its own."""
    site.commands.indexes = {"20": (0,)}
    before = group("8", "9")
    site.told(carried("8", 0), carried("9", 0, state="suspended"), groups=[(before, before.packs[:1])])
    new = job("7", gpu_class="guaranteed"), pending("gpu", id="7", number=7)
    site.look(bound("8", leaves=True), bound("9"), new, others=(placeholder("20"),), used=1)
    site.agents.share([SharedGpus("n0", 1, (Pack(("7",), 1, 1), Pack(("9",))))])
    (ordered,) = site.order().groups
    served = {pack: 100.0 if pack.jobs == ("8",) else 0.0 for pack in ordered.shared.packs}
    assert [pack.jobs for pack in next_packs(ordered.shared.packs, served, 1)] == [("8",)]


def test_one_that_is_about_to_be_asked_to_leave_makes_nobody_else_start_anew(site: Site) -> None:
    """The plan has 7 and 9 on the GPU, and says nothing of 6, which is there, too, and came before them."""
    site.commands.indexes = {"20": (0,)}
    site.told(*(carried(number, 0) for number in "679"))
    site.look(*(bound(number) for number in "679"), others=(placeholder("20"),), used=1)
    site.agents.share([group("7", "9")])
    assert site.agents.misplaced == {"6"}


def test_what_is_learned_of_a_job_is_its_users_unless_it_declares_a_family(site: Site) -> None:
    """Two users' `train.sh` are two programs; a family is one, whoever trains it."""
    site.told()
    found = []
    for number, user, spec in (("7", "ada", {}), ("8", "bob", {}), ("9", "bob", {"model_family": "bert-squad"})):
        each, slurm_job = bound(number, 1, **spec)
        found.append((dataclasses.replace(each, name="train.sh", user=user), slurm_job))
        site.commands.indexes[number] = (int(number) - 7,)
    site.look(*found)
    site.agents.share([])
    assert [each.kind for each in site.order().jobs] == ["ada/train.sh", "bob/train.sh", "bert-squad"]
