"""What detached runs need besides their instances: links, a launch template, and the objects in the staging bucket."""

from __future__ import annotations

import logging
import pwd
from collections.abc import Callable

from penstock_cloud.failures import Kind, LaunchFailed
from penstock_cloud.fleet import Fleet
from penstock_cloud.runs import BurstRun
from penstock_cloud.settings import CloudSettings
from penstock_cloud.share import Share
from penstock_cloud.staging import CLOUD_RUNNER, INSTANCE, LONGEST_S, StagingBucket
from penstock_cloud.user_data import detached

log = logging.getLogger(__name__)

LINKS_S = 3600.0
"""How long a run's links stay valid after the end of its instance's longest life."""


class DetachedRuns:
    """See the module. S3's errors are only logged: they must not prevent instances from being ended.

    Args:
        staging: None: the site's runs are not detached, and all questions about objects are answered with None.
    """

    def __init__(self, settings: CloudSettings, share: Share, staging: StagingBucket | None) -> None:
        self._settings, self._share, self._staging = settings, share, staging
        self.trouble = ""
        """Why S3 has refused something since `begin`; empty: it has not."""
        self._silent = False
        self.longest_s = None if staging is None else LONGEST_S - settings.boot_timeout_s - LINKS_S
        """Longest life of an instance: its links must be valid from before its boot until its files are fetched. None: no
        limit."""

    @property
    def on(self) -> bool:
        """Whether the site's runs are detached."""
        return self._staging is not None

    def begin(self) -> None:
        """A new pass begins: S3 may answer again."""
        self._silent = False

    def prepare(self, run: BurstRun, fleet: Fleet) -> str:
        """Write the links for the run's cloud runner and instance. Returns the launch template; empty: the site's own.

        Raises LaunchFailed, KeyError (this machine does not know the job's user).
        """
        if self._staging is None or self.longest_s is None:
            return ""
        uid = pwd.getpwnam(run.user).pw_uid
        good_s = run.lifetime_s + LONGEST_S - self.longest_s
        mine = self._staging.links(run.id, INSTANCE, good_s) | {"get_alive": self._staging.alive_link(good_s)}
        template = fleet.own_template(run.id, detached(self._settings, mine))
        try:
            self._share.write_links(run.job, self._staging.links(run.id, CLOUD_RUNNER, good_s), uid)
        except OSError as error:
            raise LaunchFailed(Kind.THROTTLED, "", f"{self._settings.share}: {error}") from error  # no error of EC2's
        return template

    def say_alive(self, now_s: float) -> None:
        """Tell all instances that penstockd is alive."""
        self._ask(lambda staging: staging.say_alive(now_s))

    def stop(self, run: BurstRun) -> None:
        """Ask the run to save and end."""
        self._ask(lambda staging: staging.stop(run.id))

    def has(self, run: BurstRun, what: str) -> bool | None:
        """Whether the run has written this object. None: S3 does not answer, or the run is not detached."""
        return self._ask(lambda staging: staging.has(run.id, what))

    def handed_back(self, run: BurstRun) -> bool | None:
        """Whether the run has written all its output files. None: S3 does not answer."""
        told = [self.has(run, what) for what in ("stopped", "result")]
        return True if True in told else None if None in told else False

    def tidy(self, run: BurstRun) -> str:
        """Delete the run's links and objects. Returns what its user must know about what is left; empty: nothing."""
        if self._staging is None:
            return ""
        self._share.drop_links(run.job)
        if self.has(run, "fetched") or self.has(run, "output") is False:
            self._ask(lambda staging: staging.clear(run.id))
        elif self.has(run, "output"):  # perhaps the only copy; the bucket's lifecycle rule deletes it eventually
            where = f"its output files were not fetched; they are in {self._staging.where(run.id)}"
            log.warning("the objects of a run stay in the bucket", extra={"run": run.id, "job": run.job, "text": where})
            return where
        return ""

    def _ask(self, ask: Callable[[StagingBucket], bool | None]) -> bool | None:
        if self._staging is None or self._silent:
            return None
        try:
            return ask(self._staging)
        except LaunchFailed as error:
            self._silent = error.kind is Kind.LOST
            self.trouble = f"S3 refuses the objects that instances need: {error}"
            log.warning("S3 is away", extra={"text": str(error)})
            return None
