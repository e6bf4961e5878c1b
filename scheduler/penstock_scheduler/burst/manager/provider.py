"""The port to a cloud: what the burst manager needs of a provider, and nothing of any provider in particular.

A `Provider` is one *place* in which instances are launched, such as a region of EC2. The manager has a list of them. Every call
may be repeated, and no provider keeps state of its own: what it lists is what there is.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from penstock_scheduler.api.ports import CloudNode

Market = Literal["on-demand", "spot"]

LONGEST_S = 30.0
"""Longest pause before a request is repeated."""

LONGEST_BACK_OFF_S = 3600.0
"""Longest time for which a type is avoided after refusals in a row, s."""


ADOPTED = "adopted"
"""The tag `owner` of an instance that an admin has given to the site, whatever store launched it."""


class Kind(StrEnum):
    """The reaction to a provider's refusal."""

    CAPACITY = "no capacity"
    """Avoid this type and market for a while, and try the next one."""
    QUOTA = "quota"
    """Stop using this market and tell the admin: a repeated request would fail again."""
    THROTTLED = "throttled"
    """Repeat the request a little later."""
    LOST = "no answer"
    """The result is unknown: repeat the request with the same token."""
    CONFIG = "configuration"
    """It concerns every order: stop launching, and tell the admin."""
    UNKNOWN = "unknown"
    """Avoid this type and market for a while, and tell the admin."""


class LaunchFailed(Exception):
    """A provider has not done what it was asked.

    Attributes:
        kind: what to do about it.
        code: the provider's code, empty if there was no answer.
        words: the provider's own message, for people.
    """

    def __init__(self, kind: Kind, code: str, words: str) -> None:
        super().__init__(f"{code}: {words}" if code else words)
        self.kind, self.code, self.words = kind, code, words


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of instance that can be ordered now on one market, and its price.

    Attributes:
        instance_type: the provider's name for it.
        usd_per_h: US dollars an hour of one instance, with all that it needs, > 0.
        extras_usd_per_h: the part of `usd_per_h` that is not the instance's own price, such as its volume.
    """

    instance_type: str
    market: Market
    gpu_type: str
    gpus: int
    vcpus: int
    memory_mib: int
    usd_per_h: float
    extras_usd_per_h: float = 0.0

    @property
    def line(self) -> str:
        """The type on its market, as messages and offers name it."""
        return line(self.instance_type, self.market)

    @property
    def family(self) -> str:
        """The types on its market that share a quota."""
        return line(self.instance_type.split(".")[0], self.market)

    def suits(self, node: CloudNode) -> bool:
        """Whether an instance of this kind may be launched for a node."""
        return (
            node.free
            and (node.gpu_type, node.gpus) == (self.gpu_type, self.gpus)
            and node.cpus <= self.vcpus
            and node.memory_mb <= self.memory_mib
        )


@dataclass(frozen=True, slots=True)
class Order:
    """An order for a gang: one instance for each of `nodes`, all or none.

    Attributes:
        run: id of the run, and the name of all that is made for it.
        token: the same for the same order, however often it is placed.
        instance_type: the provider's.
        market: `on-demand` or `spot`.
        nodes: names of the nodes that the instances become; the tag `node` of each.
        tags: Penstock's tags of all instances. They are the same in every attempt.
        usd_per_h: an instance's own price, as it was offered. On the spot market, the highest price that may be charged.
        guest: the script that a detached instance runs, compressed or not; None: the instances join Slurm, and run the
            provider's own script.
        until_s: end of the longest life, s since 1970. Reserved capacity must last until then.
    """

    run: str
    token: str
    instance_type: str
    market: str
    nodes: tuple[str, ...]
    tags: Mapping[str, str]
    usd_per_h: float
    guest: bytes | None = None
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DescribedInstance:
    """An instance as its provider describes it. Times are in s since 1970."""

    id: str
    state: str
    """The provider's word for it."""
    instance_type: str
    zone: str
    launched_s: float
    ended_s: float | None
    """None: it has not ended, or the provider does not say when."""
    tags: Mapping[str, str]
    """Penstock's tags, without a prefix."""
    region: str
    """The place."""
    gone: bool = False
    """Whether it has ended, and costs nothing any more."""
    taken: bool = False
    """Whether the provider has taken it back from the spot market."""
    spot: bool = False
    """Whether it is billed at the prices of the spot market."""


Listed = list[DescribedInstance]


class Provider(Protocol):
    """One place in which instances are launched. Every method raises LaunchFailed."""

    @property
    def name(self) -> str:
        """The place's name. It is in the record of every run there, and never changes."""
        ...

    def offers(self, now_s: float) -> Sequence[Machine]:
        """What can be ordered, as far as its price is known well enough."""
        ...

    def prices(self, now_s: float) -> str:
        """Which known prices are too old to be used, with the remedy; empty: none. `offers` leaves them out. Asks nobody."""
        ...

    def refresh(self, now_s: float) -> None:
        """Fetch prices anew where that is due. Does not raise: what fails is in `prices` once the known ones are too old."""
        ...

    def news(self) -> str:
        """A change outside that is used only once an admin accepts it, with the command, or nothing. It makes no call."""
        ...

    def accept(self) -> str:
        """Use it from now on. Returns its name, or nothing if it was in use already."""
        ...

    def spot_prices(self, instance_type: str, zone: str, begin_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """The prices on the spot market in a zone between two times: (since when, s since 1970; US dollars an hour).

        The oldest comes first, and held at the first time. A provider that does not tell them has none.
        """
        ...

    def launch_gang(self, order: Order) -> Mapping[str, str]:
        """Launch the instances of an order, all or none. Returns node -> id.

        All that is launched has the tags `site` and `run` from the first moment, so that what a failed or lost call has
        launched nevertheless is found by `list`. The same order again launches nothing twice.
        """
        ...

    def list(self, run: str | None = None) -> Listed:
        """This site's instances, of one run or of all, with those that have ended lately. Oldest first."""
        ...

    def known(self, ids: Collection[str]) -> Listed:
        """Those of these instances that the provider lists, whatever tags they have by now. Oldest first."""
        ...

    def forgotten(self, id_: str) -> bool:
        """Whether the provider says that there is no such instance. A listing that lacks the instance does not say so."""
        ...

    def terminate(self, ids: Sequence[str]) -> None:
        """End instances. Those that are gone already are ignored."""
        ...

    def tidy(self, run: str) -> None:
        """Delete what was made for a run besides its instances, after they have ended."""
        ...

    def check(self) -> str:
        """Why nothing can be launched here, with the remedy; empty: nothing is known to be wrong. It may cost nothing."""
        ...


class Guests(Protocol):
    """What runs need besides instances, where no network connects the instances to the site: detached runs.

    No method raises but `prepare`: trouble here must not prevent instances from being ended.
    """

    on: bool
    """Whether the site's runs are detached."""
    trouble: str
    """Why what instances need was refused since `begin`; empty: it was not."""
    longest_s: float | None
    """Longest life of an instance; None: no limit."""

    def begin(self) -> None:
        """A new pass begins."""
        ...

    def prepare(self, run: str, job: str, user: str, lifetime_s: float, nodes: Sequence[str]) -> bytes | None:
        """The script of a run's instances, after what its user needs was written; None: its instances join Slurm.

        Args:
            run: the run.
            job: its job.
            user: its job's user.
            lifetime_s: the longest life of its instances, seconds.
            nodes: its nodes; the job's script counts them from 0 in this order.

        Raises LaunchFailed, KeyError (this machine does not know the user).
        """
        ...

    def say_alive(self, now_s: float) -> None:
        """Tell all instances that the daemon is alive."""
        ...

    def stop(self, run: str) -> None:
        """Ask the run to save and end."""
        ...

    def has(self, run: str, what: str) -> bool | None:
        """Whether the run has written this; None: not known, or the run is not detached."""
        ...

    def handed_back(self, run: str) -> bool | None:
        """Whether the run has written all its output files; None: not known."""
        ...

    def tidy(self, run: str, job: str) -> str:
        """Delete what was made for the run. Returns what its user must know about what is left; empty: nothing."""
        ...


class JoinSlurm:
    """The `Guests` of a site whose instances join Slurm: they need nothing besides."""

    on = False
    longest_s: float | None = None

    def __init__(self) -> None:
        self.trouble = ""

    def begin(self) -> None:
        """See `Guests`."""

    def prepare(self, run: str, job: str, user: str, lifetime_s: float, nodes: Sequence[str]) -> bytes | None:
        """See `Guests`."""
        return None

    def say_alive(self, now_s: float) -> None:
        """See `Guests`. The shared folder tells instances that join Slurm."""

    def stop(self, run: str) -> None:
        """See `Guests`."""

    def has(self, run: str, what: str) -> bool | None:
        """See `Guests`."""
        return None

    def handed_back(self, run: str) -> bool | None:
        """See `Guests`."""
        return None

    def tidy(self, run: str, job: str) -> str:
        """See `Guests`."""
        return ""


def line(what: str, market: str) -> str:
    """A type or family on a market, as messages and offers name it."""
    return what if market == "on-demand" else f"{what} spot"


def pause_s(tries: int, rng: random.Random) -> float:
    """Pause before attempt number `tries + 1`: full jitter below an exponential bound (1, 2, 4, .. 30 s)."""
    return rng.uniform(0.0, min(2.0**tries, LONGEST_S))
