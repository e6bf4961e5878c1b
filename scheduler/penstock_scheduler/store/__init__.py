"""Where rounds, outcomes and reports are kept."""

from penstock_scheduler.store.files import FileStore
from penstock_scheduler.store.memory import MemoryStore

__all__ = ["FileStore", "MemoryStore"]
