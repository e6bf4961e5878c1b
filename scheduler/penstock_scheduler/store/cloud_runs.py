"""What the burst manager needs of a store. The site's store has it, and a simulation keeps it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.model.waiting import EndedJob

OLDER_STORE = "cloud.older_store"
"""Name of the stored control that says that the store was restored, or is older than the jobs: instances may belong to runs
that it does not know. The burst manager removes it once it has listed all instances and knows their runs."""


@dataclass(frozen=True, slots=True)
class CloudRunRow:
    """A run of a job in the cloud, as the store keeps it: one row of the table `instances`, also for several instances."""

    run: str
    """Job and attempt, such as `4711.2`."""
    job: str
    state: str
    launched_s: float
    """When the run was ordered."""
    ended_s: float | None
    """None: the run goes on."""
    record: str
    """JSON that the cloud's package reads and writes."""


class RunStore(Protocol):
    """See the module, and `store.SqlStore` for the methods. Every method raises StoreError."""

    def cloud_runs(self, *, job: str | None = None) -> list[CloudRunRow]:
        """Open runs, or all runs of one job; oldest first."""
        ...

    def save_cloud_run(self, row: CloudRunRow, lines: Sequence[LedgerLine] = ()) -> None:
        """Save a run and what it costs, both or neither."""
        ...

    def cloud_ledger(self) -> list[LedgerLine]:
        """All lines of the ledger in dollars, oldest first."""
        ...

    def charge(self, lines: Sequence[LedgerLine]) -> None:
        """Append to the ledger. A line whose key is there already changes nothing."""
        ...

    def control(self, name: str) -> Any:
        """What is stored under this name; None: nothing."""
        ...

    def set_control(self, name: str, value: Any) -> None:
        """Store something under a name."""
        ...

    def jobs(self, *, states: Sequence[str] = (), limit: int | None = None) -> Sequence[tuple[int, EndedJob]]:
        """(number, job) of jobs in these states, newest first."""
        ...
