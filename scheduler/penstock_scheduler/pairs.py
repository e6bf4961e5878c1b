"""What is known of pairs of jobs on one GPU: from a table, learned online from what the agents see, and stored.

It stands in the round loop's `rules`, in front of the policy: what was seen of packs since the last look is learned, and the
snapshot gets what is known of the kinds that are there now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock_profiles.colocation import Colocation, ColocationError, read_pairs
from penstock_profiles.files import save_whole
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import Job, KnownPair, Snapshot

PAIRS = "colocation.json"
"""In the daemon's state folder: what is known of pairs of jobs on one GPU."""


class Pairs:
    """See the module.

    Args:
        known: what is known to begin with, such as from a table; it learns on.
        save: called with all that is known (`Colocation.dump`) whenever there is news; None: it is not kept.
    """

    def __init__(self, known: Colocation, save: Callable[[str], None] | None = None) -> None:
        self.known = known
        self._save = save

    def on(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what is known of its pairs."""
        state = snapshot.sharing
        if state is None:
            return snapshot
        for seen in state.seen:
            if len(seen.jobs) == 2 and all(job in state.uses for job in seen.jobs):
                one, other = (state.uses[job].kind for job in seen.jobs)
                self.known.observe(seen.gpu_type, one, other, seen.speeds[0])
                self.known.observe(seen.gpu_type, other, one, seen.speeds[1])
        if state.seen and self._save is not None:
            self._save(self.known.dump())
        kinds = sorted({use.kind for use in state.uses.values()})
        types = sorted({node.gpu_type for node in snapshot.nodes})
        pairs = tuple(
            KnownPair(gpu_type, mine, theirs, share)
            for gpu_type in types
            for mine in kinds
            for theirs in kinds
            if self.known.measured(gpu_type, mine, theirs)
            and (share := self.known.share(gpu_type, mine, theirs)) is not None
        )
        return dataclasses.replace(snapshot, sharing=dataclasses.replace(state, pairs=pairs))


def kind_of(job: Job) -> str:
    """What is learned of the job holds for others of this kind: its declared family, or else its user and its name, for another
    user's `train.sh` is another program."""
    return job.spec.model_family or f"{job.user}/{job.name}"


def read_prior(path: Path | None) -> Colocation | None:
    """The site's table, `[daemon] pairs`, if it has one: see `read_pairs`.

    Raises:
        ConfigError: it cannot be read, or has no pairs.
    """
    if path is None:
        return None
    try:
        table = read_pairs(path)
    except (ColocationError, OSError) as error:
        raise ConfigError(f"[daemon] pairs: {error}; fix the file, or leave the key out") from None
    if not table.gpu_types:
        raise ConfigError(f"[daemon] pairs: {path} has no pairs; name another file, or leave the key out")
    return table


def open_pairs(path: Path, table: Colocation | None = None) -> Pairs:
    """What is known in this file, which is kept up to date; there may be none yet. Raises ConfigError if it cannot be read.

    Args:
        path: the file.
        table: what holds of pairs that nobody has measured here; it is not kept in the file.
    """
    try:
        known = Colocation.load(path.read_bytes(), str(path)) if path.exists() else Colocation()
    except (ColocationError, OSError) as error:
        raise ConfigError(f"what is known of pairs of jobs: {error}") from None
    return Pairs(known if table is None else known.over(table), partial(save_whole, path))
