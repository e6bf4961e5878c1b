"""A site with detached runs: its nodes are gateways, and cloud runners are real processes."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from penstock_cloud.catalogue import Catalogue, shipped
from penstock_cloud.ec2 import connect as connect_ec2
from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import StagingBucket, connect
from penstock_scheduler.api.ports import CloudNode
from penstock_scheduler.model import Placement
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2
from tests.cloud.site import CloudSite

BUCKET = "penstock-runs"

CLOUD_RUNNER = (
    "import sys; from penstock_cloud import cloud_runner; cloud_runner.LOOK_S = 0.3; sys.exit(cloud_runner.main())"
)
"""A cloud runner that polls more often."""


class DetachedSite(CloudSite):
    """A site with gateways as cloud nodes. They are always up, and a job that starts on one is a cloud runner, as under
    Slurm."""

    user = pwd.getpwuid(os.getuid()).pw_name

    def __init__(self, settings: CloudSettings, store: SqlStore, ec2: Ec2, folder: Path) -> None:
        self.folder = folder
        self.cloud_runners: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: dict[str, int] = {}
        ec2.staging = ec2.staging or connect(settings)
        self.staging = StagingBucket(ec2.staging, BUCKET, str(settings.site))
        super().__init__(settings, store, ec2, ec2.through)

    @staticmethod
    def catalogue() -> Catalogue:
        known = shipped()
        price = {"us-east-1a": 0.4, "us-east-1b": 0.4}
        prices = {"spot_usd_per_h": price, "spot_at": datetime.now(UTC)}
        types = {name: each.model_copy(update=prices) for name, each in known.types.items()}
        return known.model_copy(update={"types": types})

    def nodes(self) -> tuple[CloudNode, ...]:
        return tuple(CloudNode(name, kind, 1, 4, 8000, name not in self.on, True) for name, kind in self.names.items())

    def script(self, job: str, text: str) -> None:
        (self.folder / f"{job}.sh").write_text(text)

    def output(self, job: str) -> str:
        return (self.folder / f"{job}.out").read_text()

    def printed(self, job: str) -> str:
        """The job's output so far."""
        file = self.folder / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def runs(self) -> bool:
        """Whether the daemon has seen that the run has begun. A recall ends a booting instance without a request to save."""
        return [run.state for run in self.store.cloud_runs()] == ["running"]

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
        """Tick in real time, since the expected event happens in other processes."""
        begin_s = time.monotonic()
        while not condition():
            told = [path.read_text() for path in self.folder.glob("*.out")]
            assert time.monotonic() - begin_s < 240, f"still not so: {what}; {self.state.words} {told}"
            self.tick()
            self.ahead_s -= 2.0
            time.sleep(0.3)

    def stop(self) -> None:
        for cloud_runner in self.cloud_runners.values():
            cloud_runner.kill()
            cloud_runner.wait()


class QuietSite(DetachedSite):
    """A site without cloud runners and boots: each running instance has started its job, unless `begin` is false."""

    begin = True

    def _start(self, job: str, placement: Placement) -> None:
        CloudSite._start(self, job, placement)
        if self.begin:
            self.staging.put(f"{self.run_of(job)}/started", b"")


@contextlib.contextmanager
def detached_site(
    kind: type[DetachedSite], cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2, folder: Path
) -> Iterator[DetachedSite]:
    """A site with its bucket on moto. Its jobs' folder is `work`."""
    settings = cloud_settings(
        markets=("on-demand", "spot"),
        bucket=BUCKET,
        detached_user=DetachedSite.user,
        boot_timeout_s=300.0,
    )
    ec2.s3().create_bucket(Bucket=BUCKET)
    ec2.through = ec2.through or connect_ec2(settings)
    (folder / "work").mkdir()
    made = kind(settings, store, ec2, folder / "work")
    try:
        yield made
    finally:
        made.stop()


def left(ec2: Ec2) -> list[str]:
    """The objects in the bucket."""
    found = ec2.s3().list_objects_v2(Bucket=BUCKET)
    return [each["Key"] for each in found.get("Contents", [])]
