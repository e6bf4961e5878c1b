"""The body of `GET /v1/ready`: whether the daemon can do its work. `messages` has the other bodies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat

from penstock_scheduler.api.messages import Body

REFUSED = "the plan gate refused the plan"
"""How the warning of a refused plan begins."""

LOST = "a move has failed"
"""How the warning begins that no job is moved for a gain."""


class StepHealth(Body):
    """What a step of the round loop did last. Absent: it has not happened since the daemon started."""

    step: str
    round: int | None = None
    """The round that it last decided or applied."""
    age_s: NonNegativeFloat | None = None
    """Seconds since it last succeeded."""
    since_s: NonNegativeFloat | None = None
    """For how long it has been going on; absent: it is not."""
    failing: bool
    """Whether its newest attempt failed."""
    problem: str = ""
    """Why the daemon is not ready because of this step; empty: it is not because of it."""
    error: str = ""
    """Its last error, also if it has succeeded since; empty: none."""
    error_age_s: NonNegativeFloat | None = None


class DiskHealth(Body):
    """The place of the store or of the spool."""

    what: str
    where: str
    writable: bool | None
    """Whether the newest check could write; absent: no check has ended yet."""
    checked_age_s: NonNegativeFloat | None = None
    since_s: NonNegativeFloat | None = None
    """For how long the present check has been going on; absent: none is."""
    error: str = ""
    """Why a check last could not write, also if a later one could; empty: none since the daemon started."""
    error_age_s: NonNegativeFloat | None = None
    free_bytes: int | None = None
    """Free space of its file system; absent: not known, as on a database server."""
    used_bytes: int | None = None
    """What the store takes; absent: not known."""
    days_left: NonNegativeFloat | None = None
    """Days until the file system is full at its present growth; absent: it does not grow, or was seen for less than an hour."""
    problem: str = ""
    """Why nothing can be written; empty: something can."""
    warning: str = ""
    """That it will be full soon; empty: it will not."""


class FilesHealth(Body):
    """The open files of a process: each connection of a client takes one."""

    open: int
    limit: int
    warning: str = ""
    """That the limit is low, or will be reached; empty: neither."""


STANDBY = "the standby "
"""How the warning of a standby begins that has not been heard of."""


class StandbyHealth(Body):
    """A penstockd that stands by."""

    name: str
    version: str
    seen_age_s: NonNegativeFloat
    """Seconds since it was last heard of: every 2 s while it stands by."""
    since_age_s: NonNegativeFloat
    """Seconds since it began to stand by."""
    lag: int | None = None
    """Rounds that the leader has decided and the standby has not read; absent: not known."""


class LeaderHealth(Body):
    """Which of several penstockd leads."""

    here: bool
    """Whether the penstockd that answers leads."""
    name: str
    number: int
    """Its fencing number."""
    version: str
    address: str = ""
    """URL of its API."""
    alone: bool = False
    """Whether no other penstockd can take over, because the store is a file."""
    since_age_s: NonNegativeFloat | None = None
    """Seconds since it took the lead."""
    lease_age_s: NonNegativeFloat | None = None
    """Seconds since it last confirmed that."""
    lease_s: NonNegativeFloat | None = None
    """How long a confirmation holds."""
    standbys: list[StandbyHealth] = Field(default_factory=list)


class StoreAdopted(Body):
    """The other cluster to which the store belonged until an admin adopted it, or nothing."""

    was: str


class ImagesAccepted(Body):
    """The images that instances launch from now on and did not before, each with its place."""

    images: list[str]


class LeaderMove(Body):
    """The order to let another penstockd lead."""

    to: str = Field(default="", max_length=100)
    """Its name; empty: any that stands by."""


class Health(Body):
    """Whether the daemon can do its work."""

    status: Literal["ok", "not-ready"]
    version: str
    round: int | None = None
    observed_age_s: NonNegativeFloat | None = None
    """Seconds since the last complete observation of the cluster."""
    report_age_s: NonNegativeFloat | None = None
    """Seconds since the newest report of a job; absent: none has come since the daemon started."""
    problems: list[str] = Field(default_factory=list)
    """Why it is not ready."""
    warnings: list[str] = Field(default_factory=list)
    """What an admin should look at although the daemon works."""
    steps: list[StepHealth] = Field(default_factory=list)
    disks: list[DiskHealth] = Field(default_factory=list)
    files: FilesHealth | None = None
    api_files: FilesHealth | None = None
    """Of penstock-api, if it is a process of its own and answers this."""
    leader: LeaderHealth | None = None
    counters: dict[str, int] = Field(default_factory=dict)
    """Requests, accepted reports, refused reports and so on, since the daemon started."""
