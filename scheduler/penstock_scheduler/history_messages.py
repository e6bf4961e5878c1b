"""The bodies of the API's answers about what was: who held which GPUs when. `messages` has the other bodies."""

from __future__ import annotations

from typing import Literal

from penstock_scheduler.messages import Body


class AllocationSpan(Body):
    """A time in which a job held the same GPUs. The spans of a job follow each other without overlap."""

    job: str
    user: str
    account: str = ""
    partition: str = ""
    gpu_type: str
    nodes: dict[str, int]
    """Node -> GPUs of the job on it."""
    gpu_ids: dict[str, tuple[int, ...]] | None = None
    """Node -> indices of these GPUs, as Slurm counts them; None: not known."""
    where: Literal["site", "cloud"] = "site"
    shared: bool = False
    """Whether other jobs had the same GPUs, by the plan."""
    run_s: float
    """When the run began of which this span is a part."""
    restarts: int = 0
    """Restarts of the job before this run."""
    from_s: float
    to_s: float | None = None
    """None: the job holds them now, as far as penstockd has seen."""
    exact: bool = True
    """Whether the end is the cluster's own. Otherwise it is an estimate, until the cluster's accounts tell it."""
    suspended_s: float = 0.0
    """For how long the run had been suspended by its end."""
    cause: str = ""
    """Why the plan gave the job these GPUs, as code and sentence; empty: no plan did, or it is not known any more."""
    end: str = ""
    """What ended the span: the code of a stop (see docs/admin/safety.md), `ended`, `requeued`, `resized` or `unknown`."""
    end_text: str = ""
    """The same as a sentence."""

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return sum(self.nodes.values())


class Allocations(Body):
    """Allocation spans, by job and beginning."""

    spans: list[AllocationSpan]
    next: str | None = None
    """Value of `after` for the next page; None: this is the last page."""
