"""The bodies of `POST /v1/jobs/renew`: the leases of owners' jobs. `messages` has the other bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from penstock_scheduler.api.messages import Body

MAX_RENEWED = 1000
"""Most jobs whose leases one request renews."""


class Renewal(Body):
    """Renews the leases of jobs."""

    jobs: tuple[Annotated[str, StringConstraints(max_length=100)], ...] = Field(max_length=MAX_RENEWED)


class Renewed(Body):
    """The jobs whose leases were renewed. The others have none, have ended, or belong to other users."""

    jobs: list[str]
