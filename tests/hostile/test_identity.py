"""Nobody is who they say: the owner of a job is Slurm's, and no user chooses what penstockd runs.

`ANN` and `BEN` are real accounts on a real Slurm, with a penstockd of root. Each attack lists its bystanders: a plain job of
root's, and the other user's job, which must be untouched.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock_loopback import LoopbackCluster, machine, wait_for
from penstock_loopback.fixtures import skip_without_slurm
from penstock_scheduler.api.client import ApiError, Client
from penstock_scheduler.api.messages import JobView, Submission
from penstock_scheduler.model import JobSpec
from penstock_scheduler.people.errors import BadJobSpec, ClusterAway, PenstockError
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.gateway import CliGateway, ControllerAway
from penstock_slurm.settings import SlurmSettings
from tests.end_to_end.site import Site
from tests.end_to_end.test_two_users import ANN, BEN, as_user, folder_of
from tests.folders import public_folder
from tests.scheduler.service.api import ME, serving

on_slurm = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two other users"),
]


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def slurm(public: Path) -> Iterator[LoopbackCluster]:
    skip_without_slurm(accounting=False)
    with LoopbackCluster(public / "slurm", "t4:2x4") as cluster:
        yield cluster


@pytest.fixture
def site(slurm: LoopbackCluster, public: Path) -> Iterator[Site]:
    """penstockd of root is not started yet."""
    folder = Path(tempfile.mkdtemp(dir=public))
    folder.chmod(0o755)
    site = Site(slurm, folder)
    site.api |= {"listen": f"127.0.0.1:{machine.free_ports(1)}"}
    yield site
    site.stop()
    slurm.reset()


def client(site: Site) -> Client:
    return Client(f"unix:{site.state / 'api.sock'}")


def begin(site: Site) -> None:
    """Start penstockd, and load what a process needs before it becomes a user who cannot read it."""
    site.start()
    site.wait_round()
    with client(site) as root:
        assert root.me().role == "admin"


def submit(site: Site, name: str, home: Path, command: tuple[str, ...], **fields: object) -> object:
    """The id of a job that the user has submitted through the API, or (status, code) of the refusal."""
    given = {"output": str(home / "%j.out"), "working_directory": "/", "partition": "all"} | fields
    order = Submission(command=command, **given)  # type: ignore[arg-type]

    def call() -> str:
        with client(site) as line:
            return line.submit(order).id

    return as_user(name, call)


def tried(site: Site, name: str, job: str) -> dict[str, object]:
    """What each act on a job gives for this user: a code, or `done`."""

    def call() -> dict[str, object]:
        with client(site) as line:
            acts: dict[str, Callable[[], object]] = {
                "show": lambda: line.job(job),
                "cancel": lambda: line.cancel(job),
                "hold": lambda: line.hold(job),
                "release": lambda: line.release(job),
                "log": lambda: line.log(job),
            }
            found: dict[str, object] = {}
            for act, ask in acts.items():
                try:
                    ask()
                    found[act] = "done"
                except ApiError as error:
                    found[act] = error.code
            return found

    return cast("dict[str, object]", as_user(name, call))


def root_sleeps(site: Site, *options: str) -> str:
    return site.sbatch("-p", "all", "--output=/dev/null", *options, "--wrap=sleep 900")


def environment_of(path: Path) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in path.read_bytes().decode().split("\0") if pair)


class TestOnSlurm:
    pytestmark = on_slurm

    def test_programs_and_variables_of_a_user_reach_only_the_job(self, site: Site) -> None:
        """The issue's attack: a `setpriv` in the user's PATH ran outside the job, and its output was taken for a job's id."""
        plain = root_sleeps(site)
        begin(site)
        site.wait_states("RUNNING", plain)
        home = folder_of(site, ANN)
        (home / "bin").mkdir()
        ran = home / "ran"
        for program in ("setpriv", "sbatch", "prlimit", "timeout", "sh", "scontrol", "squeue"):
            fake = home / "bin" / program
            fake.write_text(f"#!/bin/sh\necho {program} >>{ran}\necho {plain}\n")
            fake.chmod(0o755)
        (home / "startup").write_text(f"echo startup >>{ran}\n")
        (home / "usercustomize.py").write_text(f"open({str(ran)!r}, 'a').write('python')\n")
        (home / "slurm.conf").write_text("ClusterName=hers\nSlurmctldHost=nowhere\n")
        home.chmod(0o777)
        wish = {
            "PATH": f"{home}/bin:/usr/bin:/bin",
            "LD_PRELOAD": f"{home}/preloaded.so",
            "BASH_ENV": f"{home}/startup",
            "ENV": f"{home}/startup",
            "PYTHONPATH": str(home),
            "SLURM_CONF": f"{home}/slurm.conf",
            "SLURM_EXIT_ERROR": "0",
            "FAKE_JOB": plain,
        }
        job = str(submit(site, ANN, home, ("/usr/bin/env", "-0"), environment=wish))
        assert job.isdigit(), job
        assert job != plain
        assert site.job(job).user == ANN
        assert not ran.exists(), f"{ran.read_text()} ran outside the job"
        assert tried(site, ANN, plain) == dict.fromkeys(("show", "cancel", "hold", "release", "log"), "no-such-job")
        assert site.states(plain) == {plain: "RUNNING"}
        site.wait_states("COMPLETED", job)
        shown = environment_of(home / f"{job}.out")
        conf = wish.pop("SLURM_CONF")
        assert {name: shown.get(name) for name in wish} == wish
        assert shown["SLURM_CONF"] == str(site.slurm.slurm_conf) != conf

    def test_the_environment_of_a_job_is_what_its_user_asked_for(self, site: Site) -> None:
        begin(site)
        home = folder_of(site, ANN)
        wish = {
            "EMPTY": "",
            "LINES": "one\ntwo\n",
            "EQUALS": "a=b=c",
            "LETTERS": "žluťoučký \U0001f427",
            "QUOTES": "\"'`$(id)\\",
            "LONG": "x" * 10_000,
            "PENSTOCK_SPOOL": "/elsewhere",
            "HOME": "/her/own",
            "SBATCH": "no option",
        } | {f"MANY_{number}": str(number) for number in range(900)}
        job = str(submit(site, ANN, home, ("/usr/bin/env", "-0"), environment=wish))
        assert job.isdigit(), job
        site.wait_states("COMPLETED", job)
        shown = environment_of(home / f"{job}.out")
        account = pwd.getpwnam(ANN)
        assert shown["PENSTOCK_SPOOL"] == str(site.spool)
        del wish["PENSTOCK_SPOOL"]
        assert {name: shown.get(name) for name in wish} == wish
        assert (shown["USER"], shown["LOGNAME"], shown["SHELL"]) == (ANN, ANN, account.pw_shell)
        assert "/usr/bin" in shown["PATH"].split(":")
        assert "SLURM_EXPORT_ENV" not in shown, "srun inside the job would export less than before"

    def test_variables_that_are_options_of_sbatch_are_refused_at_once(self, site: Site) -> None:
        begin(site)
        home = folder_of(site, ANN)
        wish = {"SBATCH_PARTITION": "all", "SBATCH_ACCOUNT": "rich", "FINE": "1"}

        def call() -> list[object]:
            with client(site) as line:
                try:
                    line.submit(Submission(command=("id",), environment=wish, working_directory=str(home)))
                except ApiError as error:
                    return [error.status, error.code, str(error)]
                return []

        status, code, text = cast("list[object]", as_user(ANN, call))
        assert (status, code) == (422, "refused")
        assert "SBATCH_ACCOUNT, SBATCH_PARTITION" in str(text)
        assert "FINE" not in str(text)

    def test_nobody_acts_on_a_job_that_is_not_theirs(self, site: Site) -> None:
        plain, array = root_sleeps(site), root_sleeps(site, "--array=1-2")
        begin(site)
        site.wait_states("RUNNING", plain)
        home = folder_of(site, ANN)
        anns = str(submit(site, ANN, home, ("sleep", "900"), key="k"))
        site.wait_states("RUNNING", anns)
        comment = json.dumps({"penstock": {}, "penstock_key": "mine"})
        held = root_sleeps(site, "--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}")
        before = site.states(plain, anns)
        for job in (plain, anns, held, array, f"{array}_1", f"{plain}_1", f"{plain} {anns}", "-1", "0", f"{plain}+"):
            codes = set(tried(site, BEN, job).values())
            assert codes <= {"no-such-job", "no-such-path"}, job
        # A key of another user, in a job of one's own, makes no job of the other's one's own, either.
        bens = str(submit(site, BEN, folder_of(site, BEN), ("sleep", "900"), key="k"))
        again = str(submit(site, ANN, home, ("sleep", "900"), key="k"))
        forged = str(submit(site, BEN, site.folder / BEN, ("sleep", "900"), key="mine"))
        assert again == anns
        assert len({anns, bens, forged, held}) == 4
        assert site.states(plain, anns) == before
        assert set(site.states(held, f"{array}_1", f"{array}_2").values()) <= {"PENDING", "RUNNING"}
        assert not [*site.spool.glob("holds/*")]

    def test_who_is_the_owner_is_asked_before_each_act(self, site: Site) -> None:
        """What penstockd remembers may be wrong: the id of a job that Slurm forgot is another's now."""
        plain = root_sleeps(site)
        site.wait_states("RUNNING", plain)
        begin(site)
        site.stop()
        with contextlib.closing(open_store(site.store, writer=True)) as store:
            now_s = time.time()
            view = JobView(
                id=plain,
                version=1,
                name="was hers",
                user=ANN,
                account="",
                state="queued",
                submit_s=now_s,
                spec=JobSpec(),
            )
            store.save_jobs([view])
        begin(site)
        found = tried(site, ANN, plain)
        assert {found[act] for act in ("cancel", "hold", "release")} == {"no-such-job"}, found
        assert site.states(plain) == {plain: "RUNNING"}
        assert not [*site.spool.glob("holds/*")]

    def test_a_job_is_cancelled_as_its_user(self, site: Site) -> None:
        """Slurm itself then refuses what is not the user's."""
        begin(site)
        job = str(submit(site, ANN, folder_of(site, ANN), ("sleep", "900")))
        assert tried(site, ANN, job)["cancel"] == "done"
        site.wait_states("CANCELLED", job)
        log = (site.slurm.log_folder / "slurmctld.log").read_text()
        uids = [
            line.rpartition("uid")[2].strip() for line in log.splitlines() if f"REQUEST_KILL_JOB JobId={job} " in line
        ]
        assert uids == [str(pwd.getpwnam(ANN).pw_uid)]


def submitter(folder: Path, sbatch: str, monkeypatch: pytest.MonkeyPatch, *records: object) -> SlurmSubmitter:
    """A submitter of this process's user whose sbatch is a script. `records`: what Slurm shows afterwards."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "sbatch"
    program.write_text(f"#!/bin/sh\n{sbatch}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    gateway = SimpleNamespace(records=lambda job: tuple(each for each in records if each.id == job))  # type: ignore[attr-defined]
    settings = SlurmSettings(partitions=("all",), conf=folder / "slurm.conf", spool_dir=folder, command_timeout_s=60)
    return SlurmSubmitter(cast(CliGateway, gateway), Spool(folder), settings)


def shown(job: str, uid: int, key: str | None) -> SimpleNamespace:
    return SimpleNamespace(id=job, uid=uid, user="somebody", comment=json.dumps({"penstock_key": key, "penstock": {}}))


MINE = os.geteuid()


@pytest.mark.parametrize("record", [None, ("3", MINE + 1, "k"), ("3", MINE, "another"), ("3", MINE, None)])
@pytest.mark.parametrize("key", ["k", None])
def test_a_job_id_is_believed_only_if_slurm_shows_that_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: tuple[str, int, str | None] | None, key: str | None
) -> None:
    """A user can trace the sbatch that runs as that user, and make it print anything."""
    records = [] if record is None else [shown(*record)]
    forged = submitter(tmp_path, "cat >/dev/null; echo 3", monkeypatch, *records)
    with pytest.raises(PenstockError, match="job 3"):
        forged.submit(Submission(key=key, command=("train",)), ME, MINE)


@pytest.mark.parametrize(("key", "error"), [("k", ClusterAway), (None, BadJobSpec)])
def test_a_job_that_slurm_does_not_show_is_not_submitted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, error: type[PenstockError]
) -> None:
    """Clients repeat what ends with ClusterAway. With a key, that finds the job; without one, it would be a second job."""
    submitting = submitter(tmp_path, "cat >/dev/null; echo 3", monkeypatch)

    def away(job: str) -> None:
        raise ControllerAway("Unable to contact slurm controller", command="squeue")

    monkeypatch.setattr(submitting._gateway, "records", away)
    with pytest.raises(error, match="contact slurm controller"):
        submitting.submit(Submission(key=key, command=("train",)), ME, MINE)


@pytest.mark.parametrize("text", ["", "no number", "3 4", "3_1", "-3", "3\\n4", "x" * 5000])
def test_what_is_no_job_id_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    forged = submitter(tmp_path, f"cat >/dev/null; printf %b '{text}'", monkeypatch, shown("3", MINE, "k"))
    with pytest.raises(PenstockError, match="instead of the job's id") as caught:
        forged.submit(Submission(key="k", command=("train",)), ME, MINE)
    assert len(str(caught.value)) < 1000


def test_output_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = submitter(tmp_path, "head -c 200000000 /dev/zero | tr '\\0' 3", monkeypatch)
    with pytest.raises(PenstockError, match="sbatch printed more than"):
        forged.submit(Submission(command=("train",)), ME, MINE)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[object]:
    with serving(tmp_path) as api:
        yield api


def test_sixty_slow_submissions_of_one_user_stop_nobody(api, monkeypatch: pytest.MonkeyPatch) -> None:
    """They held all of the API's threads."""
    go = threading.Event()
    begun = []
    one_by_one = threading.Lock()  # the stand-in numbers jobs by how many it has

    def slow(order: Submission, user: str, uid: int) -> str:
        if order.name == "slow":
            begun.append(1)
            assert go.wait(120)
        with one_by_one:
            return make(order, user, uid)

    make = api.submitter.submit
    monkeypatch.setattr(api.submitter, "submit", slow)
    done: list[object] = []

    def one() -> None:
        with api.client("me") as me:
            done.append(me.submit(Submission(command=("train",), name="slow")).id)

    threads = [threading.Thread(target=one) for _ in range(60)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: begun, 60, "a slow submission")
        with api.client("ada") as ada:
            assert ada.job("1").user == "ada"
            assert ada.history("1") is not None
            assert [each.id for each in ada.jobs()]
            with pytest.raises(ApiError) as error:
                ada.job("77")
            assert error.value.code == "no-such-job"
        assert not done
    finally:
        go.set()
        for thread in threads:
            thread.join(120)
    assert len(set(map(str, done))) == 60, "nobody's submission is lost"
