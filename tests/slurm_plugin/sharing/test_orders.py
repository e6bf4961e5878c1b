"""Orders of the daemon to the agents, and the GPU reservations for them."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from penstock_scheduler.cli.doctor import agents_in
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.model import Pack, Phase, SharedGpus
from penstock_scheduler.people.errors import ClusterAway, ConfigError
from penstock_scheduler.rounds.settings import load_settings
from penstock_scheduler.rounds.sharing.slices import next_packs
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.leadership.lease import ALONE
from penstock_scheduler.store.spool import Spool
from penstock_slurm import open_cluster
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway, SlurmNode, TimedOut
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.share.agents import SlurmAgents
from penstock_slurm.share.gpu_reservation import CHECKS, GpuReservations
from tests.scheduler.builders import job, on
from tests.slurm_plugin.boards import TWO_PAIRS
from tests.slurm_plugin.test_cluster import Told, pending

from .site import Commands, Site, bound, carried, group, placeholder, runs, start


@pytest.mark.parametrize(("links", "first", "second"), [(TWO_PAIRS, (0, 2), (1, 3)), ((), (0, 1), (2, 3))])
def test_jobs_get_reserved_gpus_that_are_connected(
    site: Site, links: tuple[tuple[int, ...], ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """Two jobs of two GPUs each begin alone on a node. GPUs 0 and 2 share a switch, and so do 1 and 3. Once the jobs are bound,
    they keep their GPUs, whatever the driver reports later."""
    site.commands.indexes = {"20": (0,), "21": (1,), "22": (2,), "23": (3,)}
    placeholders = tuple(map(placeholder, site.commands.indexes))
    found = [
        (dataclasses.replace(each, allocation=on("t4", n0=2)), slurm_job)
        for each, slurm_job in (runs("7", None), runs("8", None))
    ]

    def allotted() -> dict[str, tuple[int, ...]]:
        site.observe(*found, others=placeholders, used=4)
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
    site.observe(runs("7", None), runs("8", None), others=tuple(map(placeholder, site.commands.indexes)), used=3)
    site.agents.share([SharedGpus("n0", 2, (Pack(("7",)), Pack(("8",))))])
    assert [each.devices for each in site.order().groups] == [(1, 3)]


def test_clients_of_mps_restart_when_their_group_begins_time_slices(site: Site) -> None:
    """They are not suspended, so the third would wait until they end. As long as the packs fit, they and other jobs stay."""
    clients = [carried(number, 0).model_copy(update={"mps": True}) for number in ("1", "2")]
    found = [runs(number, None) for number in ("1", "2", "3")]
    site.told(*clients, carried("3", 1))
    site.observe(*found, others=(placeholder("90"), placeholder("91")), used=2)
    packed = Pack(("1", "2"))
    site.agents.share([SharedGpus("n0", 2, (packed, Pack(("3",))))])
    assert site.agents.misplaced == set()
    site.agents.share([SharedGpus("n0", 1, (packed, Pack(("3",))))])
    assert site.agents.misplaced == {"1", "2"}


def test_a_site_without_agents_is_left_as_it_is(tmp_path: Path) -> None:
    """A job on one node needs no request to Slurm and no order in the spool, and the doctor reports no missing agent."""
    told, commands, spool = Told(), Commands(), Spool(tmp_path / "spool")
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=spool.folder)
    clock = SimulatedClock()
    sharing = SlurmAgents(GpuReservations(commands), spool.folder, clock)  # type: ignore[arg-type]
    cluster = SlurmCluster(told, told, spool, clock, settings, lambda spec: None, sharing=sharing)  # type: ignore[arg-type]
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), restarts=0)]
    for _ in range(2):
        assert [each.phase for each in cluster.observe().jobs] == [Phase.RUNNING]
        cluster.apply(())
    assert commands.asked == []
    assert agents_in(spool.folder, clock.now_s()) == ([], [], {})


def test_gpus_of_slurms_are_told_where_there_is_an_agent(site: Site) -> None:
    site.told()
    site.commands.indexes = {"7": (2,)}
    site.observe(runs("7"))
    site.agents.share(())
    assert [each.own_devices for each in site.order().jobs] == [(2,)]


@pytest.mark.parametrize("restarted", [False, True])
def test_the_gpus_of_a_job_whose_processes_may_live_stay_reserved(site: Site, restarted: bool) -> None:
    """It is bound to GPU 0, was cancelled, and is COMPLETING. No other job gets the GPU before Slurm shows that the job has
    ended."""
    site.commands.indexes = {"20": (0,)}
    site.told(carried("7", 0))
    site.observe(runs("7", None), others=(placeholder("20"),), used=1)
    site.agents.share(())
    if restarted:
        site.begin()
    else:
        site.told()  # the agent's status for an order without it
    leaving = runs("7", None, state="COMPLETING")[1]
    new = job("8"), pending("gpu", id="8", number=8)
    together = group("8", "9")
    other = job("9"), pending("gpu", id="9", number=9)
    for _ in range(2):
        site.observe(new, other, others=(placeholder("20"), leaving), used=1)
        site.agents.share([together])
    assert ("cancel", "20") not in site.commands.asked
    assert [each.devices for each in site.order().groups if "8" in each.shared.jobs] == [()]
    site.told()
    site.observe(new, other, others=(placeholder("20"),), used=1)
    site.agents.share([together])
    assert [each.devices for each in site.order().groups] == [(0,)]


@pytest.mark.parametrize("lost", ["memory", "agent"])
def test_a_job_that_slurm_is_about_to_start_without_gpus_keeps_reservation_and_order(site: Site, lost: str) -> None:
    site.commands.indexes = {"20": (0,)}
    site.told()
    waits = job("7"), pending("gpu", id="7", number=7)
    site.observe(waits)
    site.agents.share((), [start("7")])
    assert [each.job for each in site.order().jobs] == ["7"]
    if lost == "memory":
        site.begin()
    else:
        site.clock.sleep(100.0)
    fields = {"id": "7", "number": 7, "gpus_per_node": None, "required_nodes": ("n0",), "priority": 9}
    sent = job("7", phase=Phase.STARTING, allocation=on("t4", n0=1)), pending("gpu", **fields)
    for _ in range(2):
        site.observe(sent, others=(placeholder("20"),), used=1)
        site.agents.share(())
    assert [each.job for each in site.order().jobs] == ["7"]
    assert ("cancel", "20") not in site.commands.asked


def test_a_daemon_that_starts_knows_what_the_one_before_has_promised(site: Site) -> None:
    """By the order, 7 may be bound to GPU 0 or 1, and its agent has not reported which. So no placeholder job is cancelled
    yet."""
    site.commands.indexes = {"20": (0,), "21": (1,)}
    site.told()
    wide = SharedGpus("n0", 2, (Pack(("7",)), Pack(("8",))))
    site.observe(runs("7", None), runs("8", None), others=(placeholder("20"), placeholder("21")), used=2)
    site.agents.share([wide])
    assert [each.devices for each in site.order().groups] == [(0, 1)]
    site.begin()
    site.told(carried("7", 0), carried("8"))
    site.observe(runs("7", None), runs("8", None), others=(placeholder("20"), placeholder("21")), used=2)
    site.agents.share([group("7", "8")])
    assert ("cancel", "21") not in site.commands.asked


def test_slurm_that_does_not_answer_costs_one_command_in_each_observation(site: Site) -> None:
    site.told()
    site.commands.error = TimedOut("no answer in 15 s", command="scontrol show job")
    many = [runs(str(number)) for number in range(7, 12)]
    for observations in (1, 2):
        site.observe(*many)
        assert len(site.commands.asked) == observations
        with pytest.raises(ClusterAway, match="no answer"):
            site.agents.share(())
    site.commands.error = None
    site.observe(*many)
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
    cluster = SlurmCluster(told, told, spool, clock, settings, lambda spec: None, sharing=sharing)  # type: ignore[arg-type]
    told.listed = [runs("7")[1], runs("8")[1]]
    cluster.observe()
    with pytest.raises(ClusterAway, match="no answer"):
        cluster.apply(())
    assert asked == ["7"]


def test_a_daemon_that_starts_asks_for_a_few_jobs_in_each_observation(site: Site) -> None:
    site.told()
    many = [runs(str(number)) for number in range(7, 7 + CHECKS + 3)]
    for asked in (CHECKS, CHECKS + 3, CHECKS + 3):
        site.observe(*many)
        assert len(site.commands.asked) == asked


def test_a_commands_time_out_ends_the_observation_of_the_reservations(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: object) -> str:
        raise TimedOut("no answer in 15 s", command="sbatch")

    site.told()
    monkeypatch.setattr(site.commands, "submit_placeholder", late)
    site.observe(runs("7", None))
    with pytest.raises(ClusterAway, match="no answer"):
        site.agents.share(())


def test_a_job_starts_when_its_agent_is_ready_for_this_run(site: Site) -> None:
    """The agent's report about the previous run, or its binding, does not count."""
    site.commands.indexes = {"20": (0,)}
    for told, ready in ((carried("7", 0), False), (carried("7"), False), (carried("7", state="waiting"), True)):
        site.told(told)
        site.observe((job("7"), pending("gpu", id="7", number=7)), others=(placeholder("20"),), used=1)
        site.agents.share((), [start("7")])
        assert (site.agents.keeps_back("7", "n0") == "") == ready


def test_a_folder_that_cannot_be_written_does_not_stop_the_site(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    (site.spool).mkdir()
    (site.spool / "agents").write_text("no folder")
    site.observe(runs("7", None))
    site.agents.share(())
    assert "cannot write an order" in caplog.text


def test_placeholder_jobs_on_unmanaged_nodes_are_named_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        site.observe(others=(placeholder("20", "gone"), placeholder("21")))
    (record,) = [each for each in caplog.records if each.getMessage() == "placeholder jobs left behind"]
    assert record.__dict__["jobs"] == "20"


@pytest.mark.parametrize(("there", "found"), [(False, 0), (True, 2)])
def test_a_task_whose_offer_is_withdrawn_sees_no_gpu(tmp_path: Path, there: bool, found: int) -> None:
    """0: the job is not co-located, and its variables are left alone; 2: its time slice never came."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler (Debian: make gcc libslurm-dev)")
    source = Path(__file__).parents[3] / "slurm_plugin" / "spank" / "devices.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "devices.so", source], check=True, timeout=300)
    devices = ctypes.CDLL(str(tmp_path / "devices.so")).penstock_devices
    folder = tmp_path / "7"
    if there:
        folder.mkdir()
        threading.Timer(3.0, folder.rmdir).start()
    texts = [ctypes.create_string_buffer(4096) for _ in range(3)]
    assert devices(str(tmp_path).encode(), 7, os.geteuid(), 600, *texts) == found


def node(name: str, *, stand_in: bool) -> SlurmNode:
    state = frozenset({"IDLE"})
    return SlurmNode(name, {"t4": 4}, {}, state, ("all",), 16, 0, 64_000, 0, stand_in=stand_in)


def test_agents_are_refused_where_jobs_cannot_start_without_gpus(tmp_path, monkeypatch, caplog):
    """Releases after 22.05 need another GRES on nodes with GPUs. It is an error if all nodes lack it, but not if one does."""
    nodes, version = [node("n0", stand_in=False), node("n1", stand_in=False)], (24, 11)
    monkeypatch.setattr(CliGateway, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(CliGateway, "version", lambda _: version)
    monkeypatch.setattr(CliGateway, "nodes", lambda _: nodes)
    settings = tmp_path / "penstock.toml"
    settings.write_text(f'[slurm]\npartitions = ["all"]\nspool_dir = "{tmp_path}"\nagents = true\n')

    def stands_in() -> bool:
        sharing = open_cluster(load_settings(settings), WallClock(), lambda spec: None, ALONE).agents
        return sharing is not None and sharing.stand_in

    with pytest.raises(ConfigError, match=r"no node has one for that.*penstock:no_consume:1"):
        stands_in()
    nodes[1] = node("n1", stand_in=True)
    assert stands_in()
    assert [(each.nodes, each.count) for each in caplog.records if hasattr(each, "nodes")] == [("n0", 1)]
    nodes[1], version = node("n1", stand_in=False), (22, 5)
    assert not stands_in()


def test_no_jobs_share_on_a_node_where_jobs_cannot_start_without_gpus(site: Site) -> None:
    site.agents.stand_in = True
    site.told()
    site.observe((job("8"), pending("gpu", id="8", number=8)))
    assert not site.agents.takes(start("8"))
    assert site.agents.keeps_back("8", "n0") == "waits for n0 to have GRES penstock"
    site.agents.stand_in = False
    assert site.agents.takes(start("8"))


def test_a_new_guaranteed_job_waits_for_the_time_slice_of_a_running_departing_job(site: Site) -> None:
    """It has had no GPU yet, so it is not suspended. 8 has its time slice alone, and 9 waits for its own."""
    site.commands.indexes = {"20": (0,)}
    before = group("8", "9")
    site.told(carried("8", 0), carried("9", 0, state="suspended"), groups=[(before, before.packs[:1])])
    new = job("7", gpu_class="guaranteed"), pending("gpu", id="7", number=7)
    site.observe(bound("8", leaves=True), bound("9"), new, others=(placeholder("20"),), used=1)
    site.agents.share([SharedGpus("n0", 1, (Pack(("7",), 1, 1), Pack(("9",))))])
    (ordered,) = site.order().groups
    served = {pack: 100.0 if pack.jobs == ("8",) else 0.0 for pack in ordered.shared.packs}
    assert [pack.jobs for pack in next_packs(ordered.shared.packs, served, 1)] == [("8",)]
