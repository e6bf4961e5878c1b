"""The AMI of a region: the one of the settings, or the one that a parameter of Systems Manager had when it was pinned.

The store keeps what is pinned, so that neither a restart nor a change of the parameter changes an instance. An admin accepts a
change.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.provider import LaunchFailed
from penstock_scheduler.store.cloud_runs import RunStore

log = logging.getLogger(__name__)

LOOK_UP = "ssm:"
"""How `[cloud] image` begins if a parameter of Systems Manager has the AMI's id."""

PINNED = "cloud.images"
"""Name of the stored control with each region's `[cloud] image` and the AMI that it meant: region -> [image, AMI]."""

LOOK_S = 3600.0
"""Seconds between two looks at the parameter."""


class AskEc2(Protocol):
    """Calls a method of EC2's client, or of `client`. Raises LaunchFailed."""

    def __call__(self, method: str, client: Any = None, /, **asked: Any) -> Any:
        """See the class."""
        ...


class PinnedImage:
    """See the module.

    Args:
        ask: calls AWS.
        settings: the settings as they are in this region.
        ssm: boto3's client of Systems Manager, if the image is looked up there.
        store: keeps the pinned images. Without one, they are kept for as long as this object lives.
    """

    def __init__(self, ask: AskEc2, settings: CloudSettings, ssm: Any = None, store: RunStore | None = None) -> None:
        self._ask, self._settings, self._ssm, self._store = ask, settings, ssm, store
        self._own: dict[str, list[str]] = {}
        self._named = ""
        self._again_s = 0.0

    def id(self) -> str:
        """Id of the AMI. It is pinned at the first time. Raises LaunchFailed."""
        if not self.looked_up:
            return self._settings.image
        return self._pinned or self._pin(self._look_up())

    def look(self, now_s: float) -> None:
        """Look up the parameter again, if that is due, and pin the first AMI. A refusal is only logged."""
        if not self.looked_up or now_s < self._again_s:
            return
        self._again_s = now_s + LOOK_S
        try:
            self._named = self._look_up()
        except LaunchFailed as error:
            log.warning("the image's parameter cannot be read", extra={"text": str(error)})
            return
        if not self._pinned:
            self._pin(self._named)

    def news(self) -> str:
        """How the parameter has changed, with the remedy, or nothing."""
        if not self._named or self._pinned in ("", self._named):
            return ""
        return (
            f"{self._settings.image} names {self._named} in {self._settings.region} now, and instances launch from "
            f"{self._pinned}, which is pinned; try the new one with `penstock cloud doctor --live`, and accept it with "
            "`penstock cloud accept-image`"
        )

    def accept(self) -> str:
        """Pin the AMI that the parameter names now. Returns its id if it is another one, or nothing. Raises LaunchFailed."""
        if not self.looked_up:
            return ""
        before, self._named = self._pinned, self._look_up()
        return "" if before == self._named else self._pin(self._named)

    @property
    def looked_up(self) -> bool:
        """Whether a parameter names the AMI."""
        return self._settings.image.startswith(LOOK_UP)

    @property
    def _pinned(self) -> str:
        asked, image = self._all.get(self._settings.region, ("", ""))
        return image if asked == self._settings.image else ""

    @property
    def _all(self) -> dict[str, list[str]]:
        return self._own if self._store is None else dict(self._store.control(PINNED) or {})

    def _look_up(self) -> str:
        name = self._settings.image.removeprefix(LOOK_UP)
        return str(self._ask("get_parameter", self._ssm, Name=name)["Parameter"]["Value"])

    def _pin(self, image: str) -> str:
        self._own = self._all | {self._settings.region: [self._settings.image, image]}
        if self._store is not None:
            self._store.set_control(PINNED, self._own)
        log.info("the image is pinned", extra={"region": self._settings.region, "text": image})
        return image
