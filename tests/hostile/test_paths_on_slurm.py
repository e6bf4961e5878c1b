"""What a user does with paths on a real Slurm whose penstockd is root: a terminal as output, a flooded inbox, a look into the
folders of others in the spool. The jobs of the other user go on."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import skip_without_slurm
from penstock_profiles.wire import Checkpointed, control_file, inbox_folder, reports_file
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.store.inbox import TAKEN_AT_ONCE, refused_folder
from tests.end_to_end.site import Site
from tests.end_to_end.test_two_users import ANN, BEN, as_user, folder_of
from tests.folders import public_folder

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two other users"),
]

REPORTS = r"""
folder=$PENSTOCK_SPOOL/$SLURM_JOB_ID/reports
: >"$folder/1.jsonl"
for sequence in $(seq 0 500); do
  printf '{"version":1,"job_id":"%s","epoch":1,"sequence":%s,"time_s":%s,"body":%s}\n' \
    "$SLURM_JOB_ID" "$sequence" "$(date +%s)" '{"kind":"checkpointed","progress":1.0,"seconds":0.1}' >>"$folder/1.jsonl"
  : >"$PENSTOCK_SPOOL/inbox/$SLURM_JOB_ID"
  sleep 0.5
done
"""
"""A job without Penstock's executor, as its page for users describes."""


@pytest.fixture
def site() -> Iterator[Site]:
    skip_without_slurm(accounting=False)
    with public_folder() as public, LoopbackCluster(public / "slurm", "t4:2x4") as slurm:
        folder = Path(tempfile.mkdtemp(dir=public))
        folder.chmod(0o755)
        site = Site(slurm, folder)
        site.start()
        yield site
        site.stop()


def test_paths_of_a_user_harm_nobody_else(site: Site) -> None:
    site.wait_round()
    url = f"unix:{site.state / 'api.sock'}"
    homes = {name: folder_of(site, name) for name in (ANN, BEN)}

    def with_client(name: str, act: Callable[[Client], object]) -> object:
        def call() -> object:
            with Client(url) as line:
                return act(line)

        return as_user(name, call)

    def submit(name: str, output: str, *command: str) -> str:
        order = Submission(command=command, partition="all", output=output, working_directory="/")
        return str(with_client(name, lambda line: line.submit(order).id))

    with Client(url) as root:  # loads the client's modules before a process becomes a user who cannot read them
        assert root.me().role == "admin"
        anns = submit(ANN, str(homes[ANN] / "out"), "sh", "-c", REPORTS)
        wait_for(lambda: len(site.reports(anns)) > 2, 180, "reports of a job", details=site.tail)

        # Ben names a terminal as the output of a job.
        ptmx = Path("/dev/ptmx")  # a link in some containers, which is refused before it is known where it leads
        device = str(ptmx) if ptmx.exists() and not ptmx.is_symlink() else "/dev/zero"
        bens = submit(BEN, device, "sleep", "600")
        site.wait_states("RUNNING", bens)
        wait_for(lambda: root.job(bens).start_s is not None, 120, "the API knows of it", details=site.tail)
        refused = with_client(BEN, lambda line: line.log(bens).text)
        assert refused == [403, "not-allowed"]
        assert with_client(ANN, lambda line: line.log(anns).note) == ""

        # He looks at what Ann's job and the daemon tell each other.
        spool = site.spool
        for path in (control_file(spool, anns), reports_file(spool, anns, 1)):
            assert "PermissionError" in str(as_user(BEN, lambda path=path: path.read_text())), path  # type: ignore[misc]
            assert as_user(ANN, lambda path=path: len(path.read_text()) > 0) is True  # type: ignore[misc]

        # He fills the inbox, and takes the place of Ann's announcements.
        def flood() -> int:
            inbox = inbox_folder(spool)
            for number in range(TAKEN_AT_ONCE + 2000):
                (inbox / f"x{number}").mkdir(exist_ok=True)
            return len(os.listdir(inbox))

        as_user(BEN, flood)
        before = len(site.reports(anns))
        wait_for(lambda: len(site.reports(anns)) > before + 3, 180, "more reports of the job", details=site.tail)
        wait_for(
            lambda: [each for each in root.ready().warnings if str(refused_folder(spool)) in each and BEN in each],
            180,
            "a warning that names who did it",
            details=site.tail,
        )
        assert site.states(anns, bens) == {anns: "RUNNING", bens: "RUNNING"}
        assert pwd.getpwuid(reports_file(spool, anns, 1).stat().st_uid).pw_name == ANN
        assert all(isinstance(each.body, Checkpointed) for each in site.reports(anns))
