"""Detached runs. The generated user data and the cloud runner really run, and use moto's S3 over HTTP. Slurm is modelled
simply.

The test with a real Slurm is in tests/cloud/test_detached_slurm.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_cloud.cloud_runner import pack
from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import StagingBucket, connect, of_instance
from penstock_cloud.templates import detached
from penstock_loopback import wait_for
from penstock_scheduler.burst.manager.provider import Order
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.model import BurstJob, Phase, Progress
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.detached import DetachedSite, QuietSite, detached_site, left
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.test_storm import STEPS, die_at_every_step

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="instances need curl; install it")


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    cloud_settings: Callable[..., CloudSettings],
    store: SqlStore,
    ec2: Ec2,
    tmp_path: Path,
) -> Iterator[DetachedSite]:
    """A DetachedSite, or the class in the test's parameter."""
    with detached_site(getattr(request, "param", DetachedSite), cloud_settings, store, ec2, tmp_path) as made:
        yield made


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
    site.really_until(lambda: "ready" in site.printed("7_3") and site.runs(), "output arrives while it runs")
    out = site.output("7_3")
    assert "element 3 of 7 is blue and 'green'" in out
    assert "data" in out.split()
    assert "secret" not in out, "only the named files are sent"
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
    assert left(ec2) == [f"{SITE}/alive"]
    names = [each["LaunchTemplateName"] for each in ec2.direct().describe_launch_templates()["LaunchTemplates"]]
    assert not [name for name in names if "7_3" in name]
    assert not list((site.settings.share / "detached").iterdir())
    assert len(ec2.instances()) == 1
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


APPTAINER = """#!/bin/bash
echo "$*"
exec "${@: -1}"
"""


LACKS_IT = pytest.mark.skipif(shutil.which("apptainer") is not None, reason="this machine has apptainer")


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=LACKS_IT)])
def test_a_job_runs_in_the_container_that_its_script_names(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor, there: bool
) -> None:
    """A stand-in for apptainer notes its arguments and runs the script."""
    if there:
        program = hypervisor.root("bin") / "apptainer"
        program.write_text(APPTAINER)
        program.chmod(0o755)
    site.script(
        "7", "#!/bin/bash\n#PENSTOCK container docker://lab/train:2\necho inside with $SLURM_JOB_ID$PWD\nexit 4\n"
    )
    site.submit("7")
    site.send("7")
    site.really_until(lambda: "7" in site.exits, "the job ends")
    machine = hypervisor.root(hypervisor.booted[0])
    folder, work = f"{machine}{site.folder}", f"{machine}/var/lib/penstock/run/job"
    out = site.output("7")
    if there:
        bound = f"--bind {folder} --bind {work}"
        assert f"exec --nv --pwd {folder} {bound} docker://lab/train:2 {work}/script\n" in out
        assert f"inside with 7{folder}\n" in out
    else:
        assert "penstock: the image of the instance has no apptainer\n" in out
    assert site.exits["7"] == (4 if there else 127)
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")


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
    """A run on the spot market. On EC2's notice the job checkpoints, is queued again, and continues from its checkpoint."""
    site.script("8", COUNTS)
    site.submit("8")
    site.send("8", "g5.xlarge spot")
    (instance,) = ec2.instances()
    assert instance["InstanceLifecycle"] == "spot"
    site.really_until(lambda: "begins at 0" in site.printed("8") and site.runs(), "it runs")
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
    assert left(ec2) == [f"{SITE}/alive"]


SAVES = """#!/bin/bash
#PENSTOCK output first second
trap 'sleep 3; id -un >first; exit' TERM
bash -c 'trap "sleep 4; id -un >second; exit" TERM; echo begins; while :; do sleep 0.2; done' &
wait
"""


def test_a_job_that_is_called_back_brings_its_checkpoint(site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor) -> None:
    """As a user other than root, the script saves for 3 s, and its child for 1 s after the script's end."""
    user = "nobody" if os.geteuid() == 0 else DetachedSite.user
    site.settings = site.settings.model_copy(update={"detached_user": user})
    site.crash()
    site.script("8", SAVES)
    site.submit("8")
    site.send("8")
    site.really_until(lambda: "begins" in site.printed("8") and site.runs(), "it runs")
    site.recall("8")
    site.really_until(lambda: site.jobs["8"].phase is Phase.QUEUED, "it is back in the queue")
    for name in ("first", "second"):
        assert (site.folder / name).exists(), (site.state.words, site.output("8"), hypervisor.console())
        assert (site.folder / name).read_text() == f"{user}\n"
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
@pytest.mark.parametrize("there", [True, False])
def test_an_instance_that_never_begins_is_given_back(site: QuietSite, ec2: Ec2, there: bool) -> None:
    """After boot_timeout_s the instance ends and the job is queued again; the type is paused if all the input was there."""
    site.begin = False
    site.settings = site.settings.model_copy(update={"protected_after": 1})
    site.crash()
    site.submit("9")
    site.send("9")
    if there:
        site.staging.put(f"{site.run_of('9')}/input", b"")
    site.ticks(2)
    assert len(ec2.running()) == 1
    site.sleep(301)
    site.until(lambda: not site.state.runs and not ec2.running())
    assert site.jobs["9"].phase is Phase.QUEUED
    if there:
        assert "did not start on its input within 300 s" in site.state.words["9"]
        assert "nothing is launched until an admin" in site.state.closed[0]
        assert "is paused" in site.state.closed[1]
    else:
        assert "input had not arrived within 300 s; declare its size" in site.state.words["9"]
        assert not site.state.closed


def test_abandoned_instances_end_themselves(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`short` has reached its longest life of 1 s, `silent` gets no sign of life, and `over` has done its job and is not
    ended."""
    monkeypatch.setattr("penstock_cloud.templates.LINGER_S", 1.0)
    fleet, good_s = Region(ec2.through, site.settings), 600.0
    script = site.folder / "script"
    script.write_text("#!/bin/bash\necho done\n")
    pack(site.folder / "input", script, {}, site.folder)

    def launch(run: str, lifetime_s: int, alive: str, silent_s: float = 3600.0) -> str:
        settings = site.settings.model_copy(update={"silent_s": silent_s})
        link = site.staging.link("get_object", alive, good_s)
        text = detached(settings, site.staging.links(run, of_instance(), good_s) | {"get_alive": link})
        tags = {"run": run, "lifetime_s": str(lifetime_s)}
        order = Order(run, run, "g5.xlarge", "on-demand", ("a10g-0",), tags, 1.0, guest=text)
        return fleet.launch_gang(order)["a10g-0"]

    site.staging.say_alive(time.time() + 3600)
    site.staging.put("over/input", (site.folder / "input").read_bytes())
    site.staging.put("dead", f"{time.time() - 60:.0f}".encode())
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


NOTES = """#!/bin/bash
[ "$(id -u)" != 0 ] || echo "$*" >>"$HYPERVISOR/as-root"
exec /bin/tar "$@"
"""


def test_the_users_archive_is_unpacked_by_the_user_and_changes_nothing_else(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor
) -> None:
    """Whoever has the link for the input may send any archive: with absolute paths, paths upwards, links into root's folder, and
    files that are said to be root's. As root, tar notes its arguments."""
    program = hypervisor.root("bin") / "tar"
    program.write_text(NOTES)
    program.chmod(0o755)
    user = "nobody" if os.geteuid() == 0 else DetachedSite.user
    settings = site.settings.model_copy(update={"detached_user": user})
    site.staging.say_alive(time.time() + 3600)
    links = site.staging.links("evil", of_instance(), 600.0) | {"get_alive": site.staging.alive_link(600.0)}
    tags = {"run": "evil", "lifetime_s": "3600"}
    order = Order("evil", "evil", "g5.xlarge", "on-demand", ("a10g-0",), tags, 1.0, guest=detached(settings, links))
    instance = Region(ec2.through, settings).launch_gang(order)["a10g-0"]
    home = hypervisor.root(instance) / "var" / "lib" / "penstock" / "run"
    script = site.folder / "script"
    script.write_text("#!/bin/bash\n#PENSTOCK output results\nmkdir results; echo done\n")
    pack(site.folder / "input", script, {}, site.folder)
    packed = io.BytesIO()
    with tarfile.open(site.folder / "input") as good, tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for each in good:
            archive.addfile(each, good.extractfile(each) if each.isreg() else None)
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(home)
        archive.addfile(link)
        for name in ("out/planted", f"{home}/planted", "../planted", "work/of-root"):
            file = tarfile.TarInfo(name)
            file.uid, file.gid, file.mode = 0, 0, 0o4755
            archive.addfile(file)
    site.staging.put("evil/input", packed.getvalue())
    wait_for(lambda: instance not in ec2.running() or site.staging.has("evil", "result"), 120, "it ends or runs")
    assert not (home / "planted").exists(), hypervisor.console()
    assert not (hypervisor.root("as-root")).exists(), "root never runs tar"
    if os.geteuid() == 0:
        of_root = [each for each in (home / "job").rglob("*") if each.lstat().st_uid == 0]
        assert of_root == []


def test_signals_before_the_links_are_there_stop_no_cloud_runner(tmp_path: Path) -> None:
    """Slurm may send the signal of `#SBATCH --signal` at any time. By default, each of these would end the process."""
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
            with contextlib.suppress(OSError):  # ENXIO: there is no reader
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
    assert f"{site.run_of('10')}/input" in file.read_text()
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


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
@pytest.mark.parametrize("ended", [True, False])
def test_an_instance_that_ends_is_a_loss_only_before_the_result_is_there(
    site: DetachedSite, ec2: Ec2, ended: bool
) -> None:
    """Its cloud runner may still fetch the result long after the instance has ended itself."""
    site.submit("13")
    site.send("13")
    site.until(lambda: site.store.cloud_runs()[0].state == "running")
    if ended:
        site.staging.put(f"{site.run_of('13')}/result", b"0\n")
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.ticks(5)
    assert site.jobs["13"].phase is (Phase.RUNNING if ended else Phase.QUEUED)
    if ended:
        site.finish("13")
    site.until(lambda: not site.state.runs)
    assert ("the cloud has taken" in str(site.state.words)) is not ended


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
@pytest.mark.parametrize(
    ("end", "fetched"), [("by notice", True), ("by notice", False), ("by recall", True), ("by money", True)]
)
def test_what_was_handed_back_is_fetched_although_its_instance_is_gone(
    site: QuietSite, ec2: Ec2, end: str, fetched: bool
) -> None:
    """The cloud runner has LEAVE_PATIENCE_S. Files that it does not fetch stay in the bucket, and the run says where."""
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
        site.staging.put(f"{run.id}/{what}", b"")
    if end == "by money":
        site.sleep(60)
        site.until(lambda: not ec2.running())
    else:
        ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.ticks(10)
    assert site.jobs["13"].phase is Phase.RUNNING, "its cloud runner still fetches"
    if fetched:
        site.staging.put(f"{run.id}/fetched", b"")
    else:
        site.sleep(180)
    site.until(lambda: not site.state.runs)
    assert site.jobs["13"].phase is Phase.QUEUED
    over = BurstRun.model_validate_json(site.store.cloud_runs(job="13")[0].record)
    if fetched:
        assert left(ec2) == [f"{SITE}/alive"]
    else:
        assert f"{SITE}/{run.id}/output" in left(ec2)
        assert over.why.endswith(f"were not fetched; they are in s3://penstock-runs/{SITE}/{run.id}/")
        assert site.state.words["13"] == over.why


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_a_run_whose_instance_is_gone_ends_although_s3_is_silent(site: QuietSite, ec2: Ec2) -> None:
    """An hour after its committed dollars are spent, its links have expired, whatever files it has left."""
    site.submit("13")
    site.send("13", usd=1.0)
    site.until(lambda: site.store.cloud_runs()[0].state == "running")
    site.staging = StagingBucket(connect(site.settings), "no-such-bucket", "penstock")
    site.crash()
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.ticks(5)
    assert site.jobs["13"].phase is Phase.RUNNING, "its result may be in the bucket"
    site.sleep(2 * 3600)
    site.until(lambda: not site.state.runs)
    assert site.jobs["13"].phase is Phase.QUEUED
    assert "the cloud has taken instance" in site.state.words["13"]


@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_a_run_of_more_than_a_week_is_refused_before_it_costs_anything(site: QuietSite, ec2: Ec2) -> None:
    site.submit("13")
    site.tick()
    site.tick(BurstJob("13", 1, "g5.xlarge", 200.0))
    (outcome,) = site.outcomes
    assert outcome.progress is Progress.FAILED
    assert "pay for 199 h, but detached runs last at most 167 h" in outcome.text
    assert site.tick().longest_s == pytest.approx(7 * 86400 - 300 - 3600)
    assert not site.store.cloud_runs()
    assert not ec2.instances()


@pytest.mark.long
@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_kill_9_at_every_step_of_a_detached_run(site: DetachedSite, ec2: Ec2) -> None:
    steps = die_at_every_step(site, ec2, "g5.xlarge", 1, twice=True)
    assert steps >= STEPS | {"create_launch_template", "delete_launch_template"}
    assert left(ec2) == [f"{SITE}/alive"]
    names = [each["LaunchTemplateName"] for each in ec2.direct().describe_launch_templates()["LaunchTemplates"]]
    assert names == []
    assert not list((site.settings.share / "detached").iterdir())
