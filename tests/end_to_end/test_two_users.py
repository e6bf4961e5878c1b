"""Two real accounts on a real Slurm. Each submits under its own name, and neither sees, ends or reports for the other's
jobs."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, machine, wait_for
from penstock_loopback.fixtures import skip_without_slurm
from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler.api.client import ApiError, Client
from penstock_scheduler.api.messages import Submission
from tests.end_to_end.site import Site
from tests.folders import public_folder

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two other users"),
]

ANN, BEN = "nobody", "daemon"
"""Accounts that every Debian has."""

POSTER = """
import http.client, socket, subprocess, sys
socket_path, port, munge_socket, job, body, out = sys.argv[1:]
line = http.client.HTTPConnection("penstock")
line.sock = socket.socket(socket.AF_UNIX); line.sock.connect(socket_path)
path = f"/v1/jobs/{job}/reports"
line.request("POST", path, body, {"Content-Type": "application/json"})
answer = line.getresponse(); answer.read()
by_socket = answer.status
munge = ["munge", f"--socket={munge_socket}", "-s", f"penstock POST {path}"]
proof = subprocess.run(munge, capture_output=True, text=True, check=True)
line = http.client.HTTPConnection("127.0.0.1", int(port))
headers = {"Content-Type": "application/json", "Authorization": "MUNGE " + proof.stdout.strip()}
line.request("POST", path, body, headers)
answer = line.getresponse(); answer.read()
open(out, "w").write(f"{by_socket} {answer.status}")
"""
"""The system's Python runs it inside a job, so that the kernel and munged identify the job's process."""


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
    folder = Path(tempfile.mkdtemp(dir=public))
    folder.chmod(0o755)
    site = Site(slurm, folder)
    site.api |= {
        "listen": f"127.0.0.1:{machine.free_ports(1)}",
        "munge": True,
        "munge_socket": str(slurm.munge_socket),
    }
    site.start()
    yield site
    site.stop()
    slurm.reset()


def as_user(name: str, call: Callable[[], object]) -> object:
    """The result of `call` in a process of that user. An ApiError is returned as (status, code)."""
    account = pwd.getpwnam(name)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
            os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
            try:
                answer: object = call()
            except ApiError as error:
                answer = [error.status, error.code]
            except BaseException as error:
                answer = repr(error)
            os.write(write, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def folder_of(site: Site, name: str) -> Path:
    folder = site.folder / name
    folder.mkdir(mode=0o755)
    os.chown(folder, pwd.getpwnam(name).pw_uid, -1)
    return folder


def test_users_are_apart(site: Site) -> None:
    site.wait_round()
    url = f"unix:{site.state / 'api.sock'}"
    with Client(
        url
    ) as root:  # also loads the client's modules before a process becomes a user without permission to read them
        assert root.me().role == "admin"
        homes = {name: folder_of(site, name) for name in (ANN, BEN)}

        def submit(name: str, key: str, command: tuple[str, ...]) -> str:
            output = str(homes[name] / "%j.out")
            order = Submission(key=key, command=command, partition="all", output=output, working_directory="/")
            with Client(url) as line:
                return line.submit(order).id

        # A daemon of root submits as the requesting user.
        anns = str(as_user(ANN, lambda: submit(ANN, "same", ("sh", "-c", "id -un; sleep 600"))))
        assert anns.isdigit(), anns
        output = homes[ANN] / f"{anns}.out"
        wait_for(lambda: output.exists() and output.read_text(), 120, "the job to print its user", details=site.tail)
        assert output.read_text().split() == [ANN]
        assert output.stat().st_uid == pwd.getpwnam(ANN).pw_uid
        assert site.job(anns).user == ANN

        epoch = 10**6
        each = Report(job_id=anns, epoch=epoch, sequence=0, time_s=1.0, body=Checkpointed(progress=1.0, seconds=0.1))

        def try_all(job: str) -> list[object]:
            def tried(call: Callable[[], object]) -> object:
                try:
                    call()
                except ApiError as error:
                    return error.code
                return "done"

            with Client(url) as line:
                calls = [lambda: line.job(job), lambda: line.explain(job), lambda: line.history(job)]
                calls += [lambda: line.log(job), lambda: line.report(job, [each]), lambda: line.cancel(job)]
                return [line.me().user, [view.id for view in line.jobs()], *map(tried, calls)]

        assert as_user(BEN, lambda: try_all(anns)) == [BEN, [], *["no-such-job"] * 6]
        assert site.states(anns) == {anns: "RUNNING"}

        # The same key of another user is another job, and a real job of that user cannot report for the first user's job.
        told = homes[BEN] / "told"
        body = json.dumps({"reports": [each.model_dump(mode="json")]})
        port = str(site.api["listen"]).rpartition(":")[2]
        words = (str(site.state / "api.sock"), port, str(site.slurm.munge_socket), anns, body, str(told))
        bens = str(as_user(BEN, lambda: submit(BEN, "same", ("/usr/bin/python3", "-c", POSTER, *words))))
        assert bens != anns
        wait_for(lambda: told.exists() and told.read_text(), 120, "the job to have its answer", details=site.tail)
        assert told.read_text() == "404 404"
        denied = [line for line in root.audit() if not line.allowed and line.user == BEN]
        wanted = ("POST /v1/jobs/{job}/reports", f"jobs/{anns}/reports")
        assert [(line.action, line.target) for line in denied].count(wanted) == 3, "one by hand, two by the job"
        assert ("POST /v1/jobs/{job}/cancel", f"jobs/{anns}/cancel") in [(line.action, line.target) for line in denied]
        assert not [report for report in site.reports(anns) if report.epoch == epoch]

        # Its owner may do all of this.
        codes = as_user(ANN, lambda: try_all(anns))
        assert codes == [ANN, [anns], *["done"] * 6]
        site.wait_states("CANCELLED", anns)


def test_the_job_of_a_user_has_that_users_groups(site: Site) -> None:
    site.wait_round()
    home = folder_of(site, ANN)
    order = Submission(command=("id", "-G"), partition="all", output=str(home / "out"), working_directory="/")

    def submit() -> str:
        with Client(f"unix:{site.state / 'api.sock'}") as line:
            return line.submit(order).id

    with Client(f"unix:{site.state / 'api.sock'}") as root:
        root.me()
    job = str(as_user(ANN, submit))
    site.wait_states("COMPLETED", job)
    expected = subprocess.run(["id", "-G", ANN], capture_output=True, text=True, check=True).stdout.split()
    assert (home / "out").read_text().split() == expected, "none of root's"
