"""What every provider promises to the burst manager, on each of them; and whole lives of jobs on those that are not EC2."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock_cloud.cli import app as cloud_cli
from penstock_cloud.command import Command, CommandClient, CommandSettings
from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed, Machine, Order, Provider
from penstock_scheduler.model import Phase
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.faults import Ec2
from tests.cloud.faults import Fault as Ec2Fault
from tests.cloud.faulty import Faulty, SimulatedFault
from tests.cloud.openstack_cloud import OpenStackCloud
from tests.cloud.other_cloud import OtherSite

OTHER = "5e1f0000-0000-4000-8000-000000000002"
A10G = Machine("g5.xlarge", "on-demand", "a10g", 1, 4, 16000, 1.0)


class FileCloud:
    """A command with its cloud in a file."""

    def __init__(self, folder: Path) -> None:
        self.file, self.script = folder / "cloud.json", folder / "cloud.py"
        shutil.copy(Path(__file__).parent / "file_cloud.py", self.script)
        self.script.chmod(0o755)
        machine = {"instance_type": "g5.xlarge", "gpu_type": "a10g", "gpus": 1, "vcpus": 4, "memory_mib": 16000}
        offers = {"as_of": datetime.now(UTC).isoformat(), "machines": [machine | {"usd_per_h": 1.0}]}
        self.set(instances=[], served={}, capacity=100, faults={}, careless=False, ahead_s=0.0, offers=offers)

    def set(self, **fields: Any) -> None:
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.file.write_text(json.dumps(known | fields))

    def instances(self) -> list[dict[str, Any]]:
        with self.file.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # the command empties the file before it writes it
            found: list[dict[str, Any]] = json.load(file)["instances"]
        return found

    def provider(self, site: str = SITE, timeout_s: float = 20.0, name: str = "files") -> Command:
        settings = CommandSettings(command=(str(self.script), str(self.file)), timeout_s=timeout_s)
        return Command(name, site, CommandClient(name, settings), 31.0)


@pytest.fixture
def files(tmp_path: Path) -> FileCloud:
    return FileCloud(tmp_path)


@pytest.fixture(params=["ec2", "simulated", "command", "openstack"])
def two(
    request: pytest.FixtureRequest, files: FileCloud, cloud_settings: Callable[..., CloudSettings], ec2: Ec2
) -> tuple[Provider, Provider, Callable[[], None]]:
    """A provider of each of two sites in one account, and what lets its next launch fail for want of capacity."""
    if request.param == "command":
        return files.provider(), files.provider(OTHER), lambda: files.set(capacity=1)
    if request.param == "openstack":
        cloud: OpenStackCloud = request.getfixturevalue("openstack")
        return cloud.provider(SITE), cloud.provider(OTHER), lambda: setattr(cloud.nova, "capacity", 1)
    if request.param == "simulated":
        mine = Faulty(SITE, [A10G], time.time)
        short = SimulatedFault("launch_gang", Kind.CAPACITY)
        return mine, Faulty(OTHER, [A10G], time.time, world=mine.world), lambda: mine.faults.append(short)
    from penstock_cloud.ec2 import connect

    settings = cloud_settings()
    client = ec2.through = ec2.through or connect(settings)
    none = Ec2Fault("CreateFleet", "fleet", "InsufficientInstanceCapacity")
    other = Region(client, cloud_settings(site=OTHER, image=settings.image))
    return Region(client, settings), other, lambda: ec2.faults.append(none)


def order(run: str, *nodes: str, site: str = SITE) -> Order:
    tags = {"run": run, "job": run.split(".")[0], "usd_per_h": "1.0", "lifetime_s": "60"}
    return Order(run, f"token of {run} {site}"[:48], "g5.xlarge", "on-demand", nodes, tags, 1.0)


def test_the_same_order_is_served_once(two: tuple[Provider, Provider, Callable[[], None]]) -> None:
    mine, _, _ = two
    first = mine.launch_gang(order("7.1-x", "a", "b"))
    assert set(first) == {"a", "b"}
    assert mine.launch_gang(order("7.1-x", "a", "b")) == first
    found = mine.list("7.1-x")
    assert {each.tags["node"]: each.id for each in found} == first
    assert {each.tags["site"] for each in found} == {SITE}
    assert not any(each.gone for each in found)


def test_a_site_lists_its_own_instances_alone(two: tuple[Provider, Provider, Callable[[], None]]) -> None:
    mine, others, _ = two
    (id_,) = mine.launch_gang(order("7.1-x", "a")).values()
    (its,) = others.launch_gang(order("7.1-y", "a", site=OTHER)).values()
    assert [each.id for each in mine.list()] == [id_]
    assert [each.id for each in others.list()] == [its]
    assert [each.id for each in mine.list("7.1-z")] == []
    assert [each.id for each in mine.known([its])] == [its], "by its id, whatever its tags say"


def test_what_has_ended_is_gone_and_what_never_was_is_forgotten(
    two: tuple[Provider, Provider, Callable[[], None]],
) -> None:
    mine, _, _ = two
    (id_,) = mine.launch_gang(order("7.1-x", "a")).values()
    mine.terminate([id_])
    mine.terminate([id_, "i-0123456789abcdef0"])
    (seen,) = mine.known([id_])
    assert seen.gone
    assert seen.ended_s is not None
    assert not mine.forgotten(id_)
    assert mine.forgotten("i-0123456789abcdef0")
    mine.tidy("7.1-x")
    mine.tidy("7.1-x")


def test_a_gang_is_launched_whole_or_not_at_all(two: tuple[Provider, Provider, Callable[[], None]]) -> None:
    mine, _, short = two
    short()
    with pytest.raises(LaunchFailed) as refused:
        mine.launch_gang(order("7.1-x", "a", "b"))
    assert refused.value.kind is Kind.CAPACITY
    assert all(each.gone for each in mine.list())


# --- lives of jobs


def test_a_job_lives_on_a_simulated_cloud_and_two_places_compete(plain: CloudSettings, store: SqlStore) -> None:
    """The dear place is used only when the cheap one has no capacity; the ledger is the sum of both bills."""
    sites: list[OtherSite] = []

    def now_s() -> float:
        return sites[0].now_s() if sites else time.time()

    dear_machine = Machine("g5.xlarge", "on-demand", "a10g", 1, 4, 16000, 3.0)
    cheap = Faulty(SITE, [A10G], now_s, name="cheap", capacity={"g5.xlarge": 1})
    dear = Faulty(SITE, [dear_machine], now_s, name="dear")
    site = OtherSite(plain, store, cheap, dear)
    sites.append(site)
    for job in "78":
        site.submit(job)
        site.tick()
        offers = [offer for offer in site.state.offers if offer.nodes == 1]
        site.send(job, min(offers, key=lambda offer: offer.usd_per_h).id)
        if job == "8":
            site.until(lambda: site.away == ["7"])
            assert "no g5.xlarge is left in cheap" in site.state.words["8"]
            assert {offer.id for offer in site.tick().offers} == {"g5.xlarge@dear"}
            site.send("8", "g5.xlarge@dear")
    site.until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()))
    assert [len(place.running()) for place in (cheap, dear)] == [1, 1]
    site.sleep(600)
    for job in "78":
        site.finish(job)
    site.until(lambda: not site.state.runs)
    assert site.alive() == []
    assert site.spent_usd() == pytest.approx(cheap.bill_usd() + dear.bill_usd(), abs=1e-9)
    assert site.spent_usd() > 0.6


@pytest.mark.parametrize("done", [False, True])
def test_a_lost_answer_of_a_simulated_cloud_launches_nothing_twice(
    plain: CloudSettings, store: SqlStore, done: bool
) -> None:
    place = Faulty(SITE, [A10G], time.time)
    place.faults.append(SimulatedFault("launch_gang", Kind.LOST, done=done))
    site = OtherSite(plain, store, place)
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert len(place.world) == 1


def test_an_order_with_a_lost_answer_is_found_by_its_tag_where_the_token_is_forgotten(
    plain: CloudSettings, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2 forgets tokens after some time; what the first attempt has launched is looked for before the next one."""
    place = Faulty(SITE, [A10G], time.time)
    place.faults.append(SimulatedFault("launch_gang", Kind.LOST, done=True))
    site = OtherSite(plain, store, place)
    site.submit("7")
    site.tick()
    monkeypatch.setattr(place, "_served", ForgetfulDict())
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert len(place.world) == 1


class ForgetfulDict(dict[str, Any]):
    """A dictionary that keeps nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        """See the class."""


def test_a_job_lives_on_the_admins_own_command(plain: CloudSettings, store: SqlStore, files: FileCloud) -> None:
    site = OtherSite(plain, store, files.provider())
    site.submit("7", max_gpus=2)
    site.send("7", "2x g5.xlarge", usd=3.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    first, second = files.instances()
    assert {first["tags"]["node"], second["tags"]["node"]} == {"a10g-0", "a10g-1"}
    assert first["tags"]["run"] == second["tags"]["run"] == site.run_of("7")
    site.crash()
    site.ticks(2)
    assert site.jobs["7"].phase is Phase.RUNNING
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert [each["gone"] for each in files.instances()] == [True, True]
    assert site.spent_usd() == pytest.approx(2 * 60 / 3600, abs=1e-6), "a minute at least"


@pytest.mark.parametrize("fault", ["hangs", "hangs-after", "throttled"])
def test_a_command_that_does_not_answer_is_asked_again(
    plain: CloudSettings, store: SqlStore, files: FileCloud, fault: str
) -> None:
    site = OtherSite(plain, store, files.provider(timeout_s=10.0))
    site.tick()
    site.submit("7")
    files.set(faults={"launch": fault})
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert len(files.instances()) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [("crashes", "the token of the cloud has expired"), ("babbles", "the answer to 'launch' cannot be read")],
)
def test_a_command_that_breaks_the_contract_stops_launches_and_leaves_nothing_behind(
    plain: CloudSettings, store: SqlStore, files: FileCloud, fault: str, told: str
) -> None:
    site = OtherSite(plain, store, files.provider())
    site.submit("7")
    files.set(faults={"launch": fault})
    site.send("7")
    site.until(lambda: not site.state.runs)
    assert told in site.state.words["7"]
    assert told in str(site.store.control(PROTECTED))
    assert site.alive() == []


def test_what_a_careless_command_lists_of_other_sites_is_left_alone(
    plain: CloudSettings, store: SqlStore, files: FileCloud
) -> None:
    files.provider(OTHER).launch_gang(order("7.1-y", "a", site=OTHER))
    files.set(careless=True)
    site = OtherSite(plain, store, files.provider())
    site.ticks(5)
    assert [each["gone"] for each in files.instances()] == [False]


def test_old_prices_of_a_command_are_not_used(plain: CloudSettings, store: SqlStore, files: FileCloud) -> None:
    site = OtherSite(plain, store, files.provider())
    assert site.tick().offers
    offers = json.loads(files.file.read_text())["offers"]
    files.set(offers=offers | {"as_of": "2025-06-30T00:00:00Z"})
    site.sleep(120)
    assert site.tick().offers == ()
    assert "prices of files are as of 2025-06-30" in " ".join(site.state.closed)
    files.set(offers=offers)
    site.sleep(120)
    assert site.tick().offers, "newer prices are used without a restart"


def test_a_command_that_others_may_change_is_not_started(files: FileCloud) -> None:
    files.script.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        files.provider()
    with pytest.raises(ConfigError, match="by its full path"):
        CommandClient("files", CommandSettings(command=("cloud.py",)))


def test_a_place_that_refuses_to_list_says_nothing_about_its_instances(
    plain: CloudSettings, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instances are not counted as missing: they would be charged a second time when it lists them again."""
    sites: list[OtherSite] = []

    def now_s() -> float:
        return sites[0].now_s() if sites else time.time()

    refuses, other = Faulty(SITE, [A10G], now_s, name="refuses"), Faulty(SITE, [A10G], now_s, name="other")
    site = OtherSite(plain, store, refuses, other)
    sites.append(site)
    site.submit("7")
    site.tick()
    site.send("7", "g5.xlarge@refuses")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    monkeypatch.setattr(site, "_alive", lambda: {each.tags["node"] for each in refuses.running()})
    refuses.faults.append(SimulatedFault("list", Kind.CONFIG, times=20))
    for _ in range(6):
        site.sleep(70)
        site.tick()
    (row,) = store.cloud_runs(job="7")
    assert [slot["missed"] for slot in json.loads(row.record)["slots"]] == [0]
    assert {run.job: run.state for run in site.state.runs} == {"7": "running"}


def test_penstock_cloud_speaks_of_the_commands_where_a_site_has_them_alone(tmp_path: Path, files: FileCloud) -> None:
    place = files.provider()
    (id_,) = place.launch_gang(order("7.1-x", "a")).values()
    config = tmp_path / "penstock.toml"
    config.write_text(
        f"""[daemon]
cloud = "command"
state_dir = "{tmp_path / "state"}"
[cloud]
site = "{SITE}"
name = "lab"
[cloud.commands.files]
command = ["{files.script}", "{files.file}"]
"""
    )
    said = {}
    for verb in ("refresh", "types", "list", "doctor"):
        result = CliRunner().invoke(cloud_cli, [verb, "--config", str(config)])
        assert result.exit_code == 0, (verb, result.output, result.exception)
        said[verb] = result.output
    assert "files: nothing to fetch" in said["refresh"]
    assert "g5.xlarge" in said["types"]
    assert id_ in said["list"]
    assert "ok   files: its command answers" in said["doctor"]
    assert not any("EC2" in text or "us-east-1" in text for text in said.values())
