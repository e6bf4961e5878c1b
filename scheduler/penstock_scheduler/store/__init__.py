"""The store: rounds, jobs, reports, the ledger, and all else that must survive a restart."""

from penstock_scheduler.store.database import NoSuchRow
from penstock_scheduler.store.memory import MemoryStore
from penstock_scheduler.store.rounds import OutcomeLine, summarise
from penstock_scheduler.store.sql import SqlStore, open_store

__all__ = ["MemoryStore", "NoSuchRow", "OutcomeLine", "SqlStore", "open_store", "summarise"]
