"""What detached runs need besides their instances: links, a launch template, and the objects in the staging bucket."""

from __future__ import annotations

import logging
import pwd
from collections.abc import Callable, Sequence

from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import LONGEST_S, StagingBucket, of_cloud_runner, of_instance
from penstock_cloud.templates import detached
from penstock_scheduler.burst.manager.facts import FETCH_S
from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed
from penstock_scheduler.burst.manager.share import SharedFolder

log = logging.getLogger(__name__)

LINKS_S = FETCH_S
"""How long a run's links stay valid after the end of its instance's longest life."""


class DetachedRuns:
    """See the module. S3's errors are only logged: they must not prevent instances from being ended."""

    on = True

    def __init__(self, settings: CloudSettings, share: SharedFolder, staging: StagingBucket) -> None:
        self._settings, self._share, self._staging = settings, share, staging
        self.trouble = ""
        """Why S3 has refused something since `begin`; empty: it has not."""
        self._silent = False
        self._margin_s = settings.boot_timeout_s + LINKS_S
        self.longest_s: float | None = LONGEST_S - self._margin_s
        """Longest life of an instance: its links must be valid from before its boot until its files are fetched."""

    def begin(self) -> None:
        """A new pass begins: S3 may answer again."""
        self._silent = False

    def prepare(self, run: str, job: str, user: str, lifetime_s: float, nodes: Sequence[str]) -> bytes | None:
        """Write the links for the run's cloud runner. Returns the instances' script, with their links.

        Raises LaunchFailed, KeyError (this machine does not know the job's user).
        """
        uid = pwd.getpwnam(user).pw_uid
        good_s = lifetime_s + self._margin_s
        mine = self._staging.links(run, of_instance(len(nodes)), good_s) | {
            "get_alive": self._staging.alive_link(good_s)
        }
        try:
            self._share.write_links(job, self._staging.links(run, of_cloud_runner(len(nodes)), good_s), uid)
        except OSError as error:
            raise LaunchFailed(Kind.THROTTLED, "", f"{self._settings.share}: {error}") from error  # no error of EC2's
        return detached(self._settings, mine, nodes)

    def say_alive(self, now_s: float) -> None:
        """Tell all instances that penstockd is alive."""
        self._ask(lambda staging: staging.say_alive(now_s))

    def stop(self, run: str) -> None:
        """Ask the run to save and end."""
        self._ask(lambda staging: staging.stop(run))

    def has(self, run: str, what: str) -> bool | None:
        """Whether the run has written this object. None: S3 does not answer."""
        return self._ask(lambda staging: staging.has(run, what))

    def handed_back(self, run: str) -> bool | None:
        """Whether the run has written all its output files. None: S3 does not answer."""
        told = [self.has(run, what) for what in ("stopped", "result")]
        return True if True in told else None if None in told else False

    def tidy(self, run: str, job: str) -> str:
        """Delete the run's links and objects. Returns what its user must know about what is left; empty: nothing."""
        self._share.drop_links(job)
        if self.has(run, "fetched") or self.has(run, "output") is False:
            self._ask(lambda staging: staging.clear(run))
        elif self.has(run, "output"):  # perhaps the only copy; the bucket's lifecycle rule deletes it eventually
            where = f"its output files were not fetched; they are in {self._staging.where(run)}"
            log.warning("the objects of a run stay in the bucket", extra={"run": run, "job": job, "text": where})
            return where
        return ""

    def _ask(self, ask: Callable[[StagingBucket], bool | None]) -> bool | None:
        if self._silent:
            return None
        try:
            return ask(self._staging)
        except LaunchFailed as error:
            self._silent = error.kind is Kind.LOST
            self.trouble = f"S3 refuses the objects that instances need: {error}"
            log.warning("S3 is away", extra={"text": str(error)})
            return None
