"""A site whose cloud is any provider: the burst manager runs as over EC2, without moto."""

from __future__ import annotations

import random
import threading
from typing import Any

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.manager import BurstManager
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.provider import Provider
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.site import CloudSite


class OtherSite(CloudSite):
    """See the module, and `CloudSite`."""

    def __init__(self, settings: CloudSettings, store: SqlStore, *providers: Provider) -> None:
        self.providers = providers
        nothing: Any = None
        super().__init__(settings, store, nothing, object())

    def open(self) -> BurstManager:
        lock: threading.Lock | None = None
        return BurstManager(Places(self.providers), self.settings, self.store, self, self, random.Random(1), None, lock)

    def alive(self) -> list[str]:
        """Ids of the site's instances that run."""
        return [each.id for provider in self.providers for each in provider.list() if not each.gone]

    def _alive(self) -> set[str]:
        return {each.tags["node"] for provider in self.providers for each in provider.list() if not each.gone}

    def spent_usd(self) -> float:
        return sum(line.amount for line in self.store.cloud_ledger() if line.kind == "usd")
