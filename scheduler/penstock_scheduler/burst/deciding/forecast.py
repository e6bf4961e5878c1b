"""What the cloud would cost a waiting job, and when it would leave: for `penstock explain` and `--dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_scheduler.burst.deciding.choices import choices_of, leaves_at_once, leaves_s, may_leave
from penstock_scheduler.model import Job, Offer, Snapshot
from penstock_scheduler.people.units import duration


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job's way to the cloud, as of a round.

    Attributes:
        leaves_s: when its waiting budget is over, s since 1970.
        at_once: whether it leaves even if GPUs are free on site.
        offer: the cheapest offer for its whole work; None: there is none.
        expected_usd: what it is expected to cost there, US dollars.
        most_usd: what would be committed to it, and is the most that it may cost, US dollars.
        why: why no offer may be used; empty: the one above may.
    """

    leaves_s: float
    at_once: bool = False
    offer: Offer | None = None
    expected_usd: float = 0.0
    most_usd: float = 0.0
    why: str = ""

    def words(self, now_s: float) -> str:
        """The forecast as a sentence."""
        in_s = self.leaves_s - now_s
        when = "now" if self.at_once or in_s <= 0 else f"in {duration(in_s)}, unless it gets GPUs on site before"
        if self.offer is None:
            return f"It may leave for the cloud {when}, but {self.why}."
        cost = f"for about ${self.expected_usd:.2f}, at most ${self.most_usd:.2f}"
        return f"It may leave for the cloud {when}: the cheapest there is {self.offer}, {cost}."


def forecast(job: Job, snapshot: Snapshot) -> Forecast | None:
    """The forecast for a job that waits on site; None: it may not leave, or there is no cloud."""
    cloud = snapshot.cloud
    if cloud is None or not may_leave(job, cloud) or any(run.job == job.id for run in cloud.runs):
        return None
    options, closed = choices_of(job, snapshot)
    when_s, at_once = leaves_s(job, snapshot), leaves_at_once(job, snapshot)
    if options:
        return Forecast(when_s, at_once, options[0].offer, options[0].expected_usd, options[0].usd)
    return Forecast(when_s, at_once, why="no offer there suits it now" if closed is None else closed.text)
