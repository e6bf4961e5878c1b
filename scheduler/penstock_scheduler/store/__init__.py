"""Where rounds, jobs, reports and all else that must survive are kept."""

from penstock_scheduler.store.memory import MemoryStore
from penstock_scheduler.store.sql import CloudRunRow, NoSuchRow, OutcomeLine, SqlStore, open_store, summarise

__all__ = ["CloudRunRow", "MemoryStore", "NoSuchRow", "OutcomeLine", "SqlStore", "open_store", "summarise"]
