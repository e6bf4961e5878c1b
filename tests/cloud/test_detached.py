"""Detached runs: the generated user data and the cloud runner really run, and speak to moto's S3 over HTTP; Slurm's part is
small.

The test with a real Slurm is in tests/cloud/test_detached_slurm.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_cloud.catalogue import Catalogue, shipped
from penstock_cloud.cloud_runner import Directives, Trouble, directives, environment, get, job_id, pack, unpack
from penstock_cloud.fleet import Fleet, Order
from penstock_cloud.fleet import connect as connect_ec2
from penstock_cloud.runs import BurstRun
from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import INSTANCE, StagingBucket, connect
from penstock_cloud.user_data import detached
from penstock_scheduler.model import BurstJob, Phase, Placement, Progress
from penstock_scheduler.ports import CloudNode
from penstock_scheduler.store import SqlStore
from penstock_slurm.loopback import wait_for
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.site import CloudSite
from tests.cloud.test_storm import STEPS, die_at_every_step

BUCKET = "penstock-runs"

CLOUD_RUNNER = (
    "import sys; from penstock_cloud import cloud_runner; cloud_runner.LOOK_S = 0.3; sys.exit(cloud_runner.main())"
)
"""One that looks for news more often."""

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="instances need curl; install it")


class DetachedSite(CloudSite):
    """A site whose cloud nodes are gateways: always up, and a job that starts there is its cloud runner, as Slurm would run
    it."""

    user = pwd.getpwuid(os.getuid()).pw_name

    def __init__(self, settings: CloudSettings, store: SqlStore, ec2: Ec2, folder: Path) -> None:
        self.folder = folder
        self.cloud_runners: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: dict[str, int] = {}
        ec2.staging = ec2.staging or connect(settings)
        self.staging = StagingBucket(ec2.staging, BUCKET, settings.name)
        super().__init__(settings, store, ec2, ec2.through)

    @staticmethod
    def catalogue() -> Catalogue:
        known = shipped()
        price = {"us-east-1a": 0.4, "us-east-1b": 0.4}
        types = {name: each.model_copy(update={"spot_usd_per_h": price}) for name, each in known.types.items()}
        return known.model_copy(update={"types": types})

    def nodes(self) -> tuple[CloudNode, ...]:
        return tuple(CloudNode(name, kind, 1, 4, 8000, name not in self.on, True) for name, kind in self.names.items())

    def script(self, job: str, text: str) -> None:
        (self.folder / f"{job}.sh").write_text(text)

    def output(self, job: str) -> str:
        return (self.folder / f"{job}.out").read_text()

    def _start(self, job: str, placement: Placement) -> None:
        super()._start(job, placement)
        if job in self.cloud_runners:
            return
        array, _, index = job.partition("_")
        mine = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index} if index else {}
        with (self.folder / f"{job}.out").open("ab") as out:
            self.cloud_runners[job] = subprocess.Popen(
                [sys.executable, "-c", CLOUD_RUNNER, str(self.settings.share), f"{self.folder / job}.sh"],
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env=os.environ | {"SLURM_JOB_ID": array, "COLOUR": "blue and 'green'"} | mine,
            )

    def _queue(self, job: str) -> None:
        super()._queue(job)
        if (cloud_runner := self.cloud_runners.pop(job, None)) is not None:
            cloud_runner.send_signal(signal.SIGTERM)
            try:
                cloud_runner.wait(2)
            except subprocess.TimeoutExpired:  # KillWait
                cloud_runner.kill()
                cloud_runner.wait()

    def tick(self, *actions):  # type: ignore[no-untyped-def]
        for job, cloud_runner in tuple(self.cloud_runners.items()):
            if cloud_runner.poll() is not None:
                self.exits[job] = cloud_runner.returncode
                del self.cloud_runners[job]
                self.finish(job)
        return super().tick(*actions)

    def really_until(self, condition: Callable[[], object], what: str) -> None:
        """Tick in real time: what is waited for happens in other processes."""
        begin_s = time.monotonic()
        while not condition():
            told = [path.read_text() for path in self.folder.glob("*.out")]
            assert time.monotonic() - begin_s < 240, f"{what} is still not so; {self.state.words} {told}"
            self.tick()
            self.ahead_s -= 2.0
            time.sleep(0.3)

    def stop(self) -> None:
        for cloud_runner in self.cloud_runners.values():
            cloud_runner.kill()
            cloud_runner.wait()


class QuietSite(DetachedSite):
    """Without cloud runners and without what boots: each instance has begun when it runs, unless not `begin`."""

    begin = True

    def _start(self, job: str, placement: Placement) -> None:
        CloudSite._start(self, job, placement)
        if self.begin:
            self.staging._put(f"{job}.1/started", b"")  # jobs here run once


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    cloud_settings: Callable[..., CloudSettings],
    store: SqlStore,
    ec2: Ec2,
    tmp_path: Path,
) -> Iterator[DetachedSite]:
    """A DetachedSite, or what the test's parameter says."""
    settings = cloud_settings(
        markets=("on-demand", "spot"),
        bucket=BUCKET,
        s3_endpoint=ec2.s3_url,
        detached_user=DetachedSite.user,
        boot_timeout_s=300.0,
    )
    ec2.s3().create_bucket(Bucket=BUCKET)
    ec2.through = ec2.through or connect_ec2(settings)
    (tmp_path / "work").mkdir()
    made: DetachedSite = getattr(request, "param", DetachedSite)(settings, store, ec2, tmp_path / "work")
    yield made
    made.stop()


@pytest.fixture
def hypervisor(ec2: Ec2) -> Iterator[Hypervisor]:
    """Its instances' files are where every user may go, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with Hypervisor(ec2, Path(folder) / "hypervisor") as machines:
            yield machines


def left(ec2: Ec2) -> list[str]:
    found = ec2.s3().list_objects_v2(Bucket=BUCKET)
    return [each["Key"] for each in found.get("Contents", [])]


def test_a_detached_job_runs_there_and_its_result_is_here(site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor) -> None:
    """An element of an array with input, output, and an exit status; penstockd is killed while it runs."""
    (site.folder / "data").mkdir()
    (site.folder / "data" / "numbers").write_text("1 2 3\n")
    (site.folder / "secret").write_text("stays here\n")
    site.script(
        "7_3",
        "#!/bin/bash\n#SBATCH --gres=gpu:1\n#PENSTOCK input data\n#PENSTOCK output results none\n"
        'echo "element $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID is $COLOUR"\nls\npwd\necho ready\n'
        "until [ -e go ]; do sleep 0.2; done\n"
        "mkdir results && tr ' ' + <data/numbers >results/sum\necho done >&2\nexit 3\n",
    )
    site.submit("7_3")
    site.send("7_3")
    site.really_until(lambda: "ready" in _read(site, "7_3") and _runs(site), "output arrives while it runs")
    out = site.output("7_3")
    assert "element 3 of 7 is blue and 'green'" in out
    assert "data" in out.split()
    assert "secret" not in out, "only what is named goes along"
    machine = hypervisor.root(hypervisor.booted[0])
    assert f"{machine}{site.folder}\n" in out, "the same folder, on the instance"
    site.crash()
    (machine / str(site.folder).lstrip("/") / "go").touch()
    site.really_until(lambda: "7_3" in site.exits, "the job ends")
    assert site.exits["7_3"] == 3
    assert (site.folder / "results" / "sum").read_text() == "1+2+3\n"
    assert site.output("7_3").endswith("done\n")
    assert site.output("7_3").count("element") == 1
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")
    assert left(ec2) == ["penstock/alive"]
    names = [each["LaunchTemplateName"] for each in ec2.direct().describe_launch_templates()["LaunchTemplates"]]
    assert not [name for name in names if "7_3" in name]
    assert not list((site.settings.share / "detached").iterdir())
    assert len(ec2.instances()) == 1
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


COUNTS = """#!/bin/bash
#PENSTOCK output checkpoint
trap 'echo $((count + 1)) >checkpoint; echo saved; exit 0' TERM
count=$(cat checkpoint 2>/dev/null || echo 0)
echo "begins at $count"
while [ $count -lt 1 ]; do sleep 0.2; done
"""


def test_a_spot_instance_that_ec2_takes_saves_and_its_job_goes_on_in_the_next(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor
) -> None:
    """Launched on the spot market; on EC2's notice the job checkpoints, is queued again, and begins where it was."""
    site.script("8", COUNTS)
    site.submit("8")
    site.send("8", "g5.xlarge spot")
    (instance,) = ec2.instances()
    assert instance["InstanceLifecycle"] == "spot"
    site.really_until(lambda: "begins at 0" in _read(site, "8") and _runs(site), "it runs")
    hypervisor.notice(site.jobs["8"].allocation.nodes[0])
    site.really_until(lambda: site.jobs["8"].phase is Phase.QUEUED, "it is back in the queue")
    assert (site.folder / "checkpoint").read_text() == "1\n"
    assert "saved" in site.output("8")
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")
    site.send("8", "g5.xlarge spot")
    site.really_until(lambda: "8" in site.exits, "it ends in the second instance")
    assert site.exits["8"] == 0
    assert "begins at 1" in site.output("8")
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the second run is over")
    assert len(ec2.instances()) == 2
    assert left(ec2) == ["penstock/alive"]


SAVES = """#!/bin/bash
#PENSTOCK output first second
trap 'sleep 3; id -un >first; exit' TERM
bash -c 'trap "sleep 4; id -un >second; exit" TERM; echo begins; while :; do sleep 0.2; done' &
wait
"""


def test_a_job_that_is_called_back_brings_its_checkpoint(site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor) -> None:
    """As another user than root, the script saves for 3 s, and what it has started for 1 s after the script's end."""
    user = "nobody" if os.geteuid() == 0 else DetachedSite.user
    site.settings = site.settings.model_copy(update={"detached_user": user})
    site.crash()
    site.script("8", SAVES)
    site.submit("8")
    site.send("8")
    site.really_until(lambda: "begins" in _read(site, "8") and _runs(site), "it runs")
    site.recall("8")
    site.really_until(lambda: site.jobs["8"].phase is Phase.QUEUED, "it is back in the queue")
    for name in ("first", "second"):
        assert (site.folder / name).read_text() == f"{user}\n"
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
@pytest.mark.parametrize("there", [True, False])
def test_an_instance_that_never_begins_is_given_back(site: QuietSite, ec2: Ec2, there: bool) -> None:
    """After boot_timeout_s the instance ends and the job is queued again; its type rests if it had all that it needed."""
    site.begin = False
    site.settings = site.settings.model_copy(update={"protected_after": 1})
    site.crash()
    site.submit("9")
    site.send("9")
    if there:
        site.staging._put("9.1/input", b"")
    site.ticks(2)
    assert len(ec2.running()) == 1
    site.sleep(301)
    site.until(lambda: not site.state.runs and not ec2.running())
    assert site.jobs["9"].phase is Phase.QUEUED
    if there:
        assert "had not begun on its input within 300 s" in site.state.words["9"]
        assert "nothing is launched until an admin" in site.state.closed[0]
        assert "rests" in site.state.closed[1]
    else:
        assert "input had not arrived within 300 s; declare its size" in site.state.words["9"]
        assert not site.state.closed


def test_instances_end_themselves_when_nobody_cares(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`short` has lived its 1 s, `silent` hears nothing of the daemon, and `over` has done its job, and nobody ends it."""
    monkeypatch.setattr("penstock_cloud.user_data.LINGER_S", 1.0)
    fleet, good_s = Fleet(ec2.through, site.settings), 600.0
    script = site.folder / "script"
    script.write_text("#!/bin/bash\necho done\n")
    pack(site.folder / "input", script, {}, site.folder)

    def launch(run: str, lifetime_s: int, alive: str, silent_s: float = 3600.0) -> str:
        settings = site.settings.model_copy(update={"silent_s": silent_s})
        link = site.staging._link("get_object", alive, good_s)
        text = detached(settings, site.staging.links(run, INSTANCE, good_s) | {"get_alive": link})
        tags = {"run": run, "lifetime_s": str(lifetime_s)}
        return fleet.launch(Order(run, "g5.xlarge", "on-demand", tags, 1.0, template=fleet.own_template(run, text)))

    site.staging.say_alive(time.time() + 3600)
    site.staging._put("over/input", (site.folder / "input").read_bytes())
    site.staging._put("dead", f"{time.time() - 60:.0f}".encode())
    short, silent, over = (
        launch("short", 1, "alive"),
        launch("silent", 3600, "dead", 2.0),
        launch("over", 3600, "alive"),
    )
    for instance in (short, silent, over):
        wait_for(lambda one=instance: one not in ec2.running(), 120, "it ends", details=hypervisor.console)
    assert site.staging.has("over", "result")
    console = hypervisor.console()
    assert "its longest life, 1 s, is over" in console
    assert "penstockd has been silent for 2 s" in console
    assert "the job has ended with 0" in console
    assert "its job is over" in console


def test_signals_before_the_links_are_there_stop_no_cloud_runner(tmp_path: Path) -> None:
    """Slurm may send what `#SBATCH --signal` names at any time; the default of each of these would end it."""
    (tmp_path / "detached").mkdir()
    links = tmp_path / "detached" / "5.json"
    os.mkfifo(links)
    with subprocess.Popen(
        [sys.executable, "-m", "penstock_cloud.cloud_runner", str(tmp_path), "no-script"],
        env=os.environ | {"SLURM_JOB_ID": "5"},
        stderr=subprocess.PIPE,
        text=True,
    ) as cloud_runner:
        pipes: list[int] = []

        def reads() -> bool:
            with contextlib.suppress(OSError):  # ENXIO: nobody reads
                pipes.append(os.open(links, os.O_WRONLY | os.O_NONBLOCK))
            return bool(pipes)

        wait_for(reads, 120, "the cloud runner reads its links")
        with os.fdopen(pipes[0], "w") as opened:
            for each in ("TERM", "INT", "HUP", "USR1", "USR2"):
                cloud_runner.send_signal(signal.Signals[f"SIG{each}"])
            opened.write("{}")
        assert cloud_runner.wait(60) == 1
        assert cloud_runner.stderr is not None
        assert "No such file or directory: 'no-script'" in cloud_runner.stderr.read()


def test_links_are_for_one_object_each_and_their_file_is_for_the_user_alone(site: DetachedSite, ec2: Ec2) -> None:
    site.script("10", "#!/bin/bash\n")
    site.submit("10")
    site.send("10")
    (file,) = (site.settings.share / "detached").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "X-Amz-Signature" in file.read_text()
    assert "10.1/input" in file.read_text()
    assert "testing" not in file.read_text().replace("Credential=testing", ""), "the key itself is not there"


def test_trouble_with_s3_keeps_no_instance_alive(site: DetachedSite, ec2: Ec2) -> None:
    site.script("11", "#!/bin/bash\n")
    site.submit("11")
    site.send("11")
    site.staging = StagingBucket(connect(site.settings), "no-such-bucket", "penstock")
    site.crash()
    site.finish("11")
    site.until(lambda: not site.state.runs and not ec2.running())
    assert not site.state.offers
    assert any("NoSuchBucket" in text for text in site.state.closed)


def test_a_user_whom_this_machine_does_not_know_stops_only_this_job(site: DetachedSite, ec2: Ec2) -> None:
    site.user = "nobody-of-that-name"
    site.submit("12")
    site.send("12")
    site.until(lambda: not site.state.runs)
    assert not ec2.instances()
    assert "does not know the user" in site.state.words["12"]
    assert not site.state.closed


def _read(site: DetachedSite, job: str) -> str:
    file = site.folder / f"{job}.out"
    return file.read_text() if file.exists() else ""


def _runs(site: DetachedSite) -> bool:
    """Whether the daemon has seen that the one run has begun: one that boots is ended without a word when it is called back."""
    return [run.state for run in site.store.cloud_runs()] == ["running"]


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
@pytest.mark.parametrize("ended", [True, False])
def test_an_instance_that_ends_is_a_loss_only_before_the_result_is_there(
    site: DetachedSite, ec2: Ec2, ended: bool
) -> None:
    """Its cloud runner may still be bringing the result when the instance has long ended itself."""
    site.submit("13")
    site.send("13")
    site.until(lambda: site.store.cloud_runs()[0].state == "running")
    if ended:
        site.staging._put("13.1/result", b"0\n")
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.ticks(5)
    assert site.jobs["13"].phase is (Phase.RUNNING if ended else Phase.QUEUED)
    if ended:
        site.finish("13")
    site.until(lambda: not site.state.runs)
    assert ("EC2 has taken" in str(site.state.words)) is not ended


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
@pytest.mark.parametrize(
    ("end", "fetched"), [("by notice", True), ("by notice", False), ("by recall", True), ("by money", True)]
)
def test_what_was_handed_back_is_fetched_although_its_instance_is_gone(
    site: QuietSite, ec2: Ec2, end: str, fetched: bool
) -> None:
    """The cloud runner has LEAVE_PATIENCE_S; what it does not fetch stays in the bucket, and the run says where."""
    site.submit("13")
    site.send("13", usd=1.0)
    site.until(lambda: site.store.cloud_runs()[0].state == "running")
    run = BurstRun.model_validate_json(site.store.cloud_runs()[0].record)
    if end == "by recall":
        site.recall("13")
    if end == "by money":
        site.sleep((run.expires_s or 0.0) - site.now_s() - 60)
        site.tick()
    for what in ("log", "output", "stopped"):
        site.staging._put(f"13.1/{what}", b"")
    if end == "by money":
        site.sleep(60)
        site.until(lambda: not ec2.running())
    else:
        ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.ticks(10)
    assert site.jobs["13"].phase is Phase.RUNNING, "its cloud runner still fetches"
    if fetched:
        site.staging._put("13.1/fetched", b"")
    else:
        site.sleep(180)
    site.until(lambda: not site.state.runs)
    assert site.jobs["13"].phase is Phase.QUEUED
    over = BurstRun.model_validate_json(site.store.cloud_runs(job="13")[0].record)
    if fetched:
        assert left(ec2) == ["penstock/alive"]
    else:
        assert "penstock/13.1/output" in left(ec2)
        assert over.why.endswith("was not fetched, and lies in s3://penstock-runs/penstock/13.1/")
        assert site.state.words["13"] == over.why


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_a_run_whose_instance_is_gone_ends_although_s3_is_silent(site: QuietSite, ec2: Ec2) -> None:
    """An hour after its money is used up its links are no good, whatever it has left."""
    site.submit("13")
    site.send("13", usd=1.0)
    site.until(lambda: site.store.cloud_runs()[0].state == "running")
    site.staging = StagingBucket(connect(site.settings), "no-such-bucket", "penstock")
    site.crash()
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.ticks(5)
    assert site.jobs["13"].phase is Phase.RUNNING, "perhaps it has left its result"
    site.sleep(2 * 3600)
    site.until(lambda: not site.state.runs)
    assert site.jobs["13"].phase is Phase.QUEUED
    assert "EC2 has taken instance" in site.state.words["13"]


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_a_run_of_more_than_a_week_is_refused_before_it_costs_anything(site: QuietSite, ec2: Ec2) -> None:
    site.submit("13")
    site.tick()
    site.tick(BurstJob("13", 1, "g5.xlarge", 200.0))
    (outcome,) = site.outcomes
    assert outcome.progress is Progress.FAILED
    assert "pay for 199 h, and detached runs last 167 h at most" in outcome.text
    assert site.tick().longest_s == pytest.approx(7 * 86400 - 300 - 3600)
    assert not site.store.cloud_runs()
    assert not ec2.instances()


@pytest.mark.long
@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_kill_9_at_every_step_of_a_detached_run(site: DetachedSite, ec2: Ec2) -> None:
    steps = die_at_every_step(site, ec2, "g5.xlarge", 1, twice=True)
    assert steps >= STEPS | {"create_launch_template", "delete_launch_template"}
    assert left(ec2) == ["penstock/alive"]
    names = [each["LaunchTemplateName"] for each in ec2.direct().describe_launch_templates()["LaunchTemplates"]]
    assert names == []
    assert not list((site.settings.share / "detached").iterdir())


def test_directives_name_paths_inside_the_working_directory() -> None:
    script = "#!/bin/sh\n#SBATCH -n1\n#PENSTOCK input a 'b c'\n#PENSTOCK output d\necho '#PENSTOCK input no'\n"
    assert directives(script) == Directives(("a", "b c"), ("d",))
    for line in ("#PENSTOCK inputs a", "#PENSTOCK input", "#PENSTOCK input /etc/passwd", "#PENSTOCK output ../x"):
        with pytest.raises(Trouble, match="line 1"):
            directives(line)


def test_the_environment_goes_along_but_not_what_is_this_machines() -> None:
    mine = {"PATH": "/site/bin", "A": "it's", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_x%%": "() { :; }"}
    assert environment(mine) == "A='it'\"'\"'s'\nSLURM_JOB_NODELIST=localhost\nSLURM_NODELIST=localhost\n"
    assert job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert job_id({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}) == "12_3"


def test_an_input_that_is_a_link_goes_along_as_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "far" / "set").mkdir(parents=True)
    (tmp_path / "far" / "set" / "numbers").write_text("1 2 3\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "data").symlink_to(tmp_path / "far" / "set")
    (tmp_path / "here" / "checkpoint").symlink_to(tmp_path / "far" / "set" / "numbers")
    (tmp_path / "script").write_text("#!/bin/sh\n#PENSTOCK input data\n#PENSTOCK output checkpoint\n")
    pack(tmp_path / "input", tmp_path / "script", {}, tmp_path / "here")
    with tarfile.open(tmp_path / "input") as archive:
        kinds = {each.name: each.type for each in archive if each.name.startswith("work/")}
    assert kinds == {
        "work/data": tarfile.DIRTYPE,
        "work/data/numbers": tarfile.REGTYPE,
        "work/checkpoint": tarfile.REGTYPE,
    }


def archive_of(folder: Path) -> bytes:
    with io.BytesIO() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for each in sorted(folder.iterdir()):
                archive.add(each, each.name)
        return packed.getvalue()


def test_what_comes_back_is_there_whole_or_as_before(tmp_path: Path) -> None:
    """Links to anywhere, folders that nobody may write to, a folder on site that is a link; and an archive that ends early."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "results" / "sealed").mkdir(parents=True)
    (there / "absolute").symlink_to("/opt/somewhere")
    (there / "best").symlink_to("results")
    (there / "checkpoint").write_bytes(os.urandom(100_000))
    (there / "results" / "sealed" / "sum").write_text("6\n")
    (there / "results" / "sealed").chmod(0o555)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "older").write_text("5\n")
    here.mkdir()
    (here / "results").symlink_to(tmp_path / "far")
    (here / "checkpoint").write_text("old\n")
    packed = archive_of(there)
    for torn in (packed[:60_000], b"no archive"):
        with pytest.raises(Trouble, match="cannot be unpacked"):
            unpack(io.BytesIO(torn), here)
        assert (here / "checkpoint").read_text() == "old\n"
    unpack(io.BytesIO(packed), here)
    assert (here / "checkpoint").read_bytes() == (there / "checkpoint").read_bytes()
    assert str((here / "absolute").readlink()) == "/opt/somewhere"
    assert str((here / "best").readlink()) == "results"
    assert (tmp_path / "far" / "sealed" / "sum").read_text() == "6\n"
    assert (tmp_path / "far" / "older").read_text() == "5\n", "what is not in the archive stays"
    assert sorted(each.name for each in here.iterdir()) == ["absolute", "best", "checkpoint", "results"]


def test_what_cannot_be_put_in_its_place_keeps_nothing_else_from_its_own(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here / "a"):
        folder.mkdir(parents=True)
    for name in ("a", "b"):
        (there / name).write_text(name)
    with pytest.raises(Trouble, match="1 of the files"):
        unpack(io.BytesIO(archive_of(there)), here)
    assert (here / "b").read_text() == "b"


def test_a_download_that_ends_early_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for size in (9, 5):
                connection = server.accept()[0]
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n12345" % size)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        link = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with io.BytesIO() as content:
            assert not get(link, content)
            assert get(link, content)
            assert content.read() == b"12345"
        thread.join()


def test_a_job_that_nobody_ordered_anything_for_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock_cloud.cloud_runner", str(tmp_path), "script"],
        env=os.environ | {"SLURM_JOB_ID": "5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "nobody has ordered an instance for this job; submit it" in done.stderr
