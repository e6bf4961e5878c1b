"""How fast pairs of jobs run on one GPU: from a table, and learned from what the agents measure.

`Pairs.on` is one of the round loop's `rules`, before the policy. It learns from the packs measured since the last observation,
and adds to the snapshot what is known of the kinds of jobs that are present.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock_profiles.colocation import Colocation, ColocationError, read_pairs
from penstock_profiles.files import save_whole
from penstock_scheduler.model import Job, KnownPair, Snapshot
from penstock_scheduler.people.errors import ConfigError

PAIRS = "colocation.json"
"""Name of the file in the daemon's state folder."""


class Pairs:
    """The speeds of pairs; see the module.

    Args:
        known: what is known at the beginning, for example from a table. It is updated.
        save: called with everything known (`Colocation.dump`) whenever something new is learned; None: it is not saved.
    """

    def __init__(self, known: Colocation, save: Callable[[str], None] | None = None) -> None:
        self.known = known
        self._save = save

    def on(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what is known of its pairs of jobs."""
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
    """The kind of a job: what is learned of one job holds for others of its kind.

    It is the declared model family, or else user and name, because another user's `train.sh` is another program.
    """
    return job.spec.model_family or f"{job.user}/{job.name}"


def read_prior(path: Path | None) -> Colocation | None:
    """The site's table, `[daemon] pairs`, if it has one; see `read_pairs`.

    Raises:
        ConfigError: the table cannot be read, or has no pairs.
    """
    if path is None:
        return None
    try:
        table = read_pairs(path)
    except (ColocationError, OSError) as error:
        raise ConfigError(f"[daemon] pairs: {error}; fix the file or remove the setting") from None
    if not table.gpu_types:
        raise ConfigError(f"[daemon] pairs: {path} has no pairs; name another file or remove the setting")
    return table


def open_pairs(path: Path, table: Colocation | None = None) -> Pairs:
    """What this file knows. The file is kept up to date, and need not exist yet. Raises ConfigError if it cannot be read.

    Args:
        path: the file.
        table: holds for pairs that were not measured here; it is not saved in the file.
    """
    try:
        known = Colocation.load(path.read_bytes(), str(path)) if path.exists() else Colocation()
    except (ColocationError, OSError) as error:
        raise ConfigError(f"the speeds of pairs of jobs cannot be read: {error}") from None
    return Pairs(known if table is None else known.over(table), partial(save_whole, path))
