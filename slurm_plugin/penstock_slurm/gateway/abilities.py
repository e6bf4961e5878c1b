"""What each release of Slurm says and can do. No other module of Penstock compares versions of Slurm.

`RELEASES` is known beforehand: the words that Slurm's commands print, and which updates of a pending job work. `Abilities` is
learned: whether a running job can give up nodes also depends on the site's configuration, so it is tried when first needed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock_profiles.files import save_whole

if TYPE_CHECKING:
    from penstock_slurm.gateway import SlurmError

log = logging.getLogger(__name__)

Version = tuple[int, int]
"""A release of Slurm, such as (22, 5)."""

TESTED: tuple[Version, ...] = ((22, 5), (24, 11), (26, 5))
"""The releases with which the whole test suite has run; README.md says when."""


@dataclass(frozen=True, slots=True)
class Release:
    """What Slurm's commands print and accept from one release on, until the next one in `RELEASES`."""

    since: Version
    job_states: frozenset[str]
    """Every state of a job that squeue prints, except `?`, which means that squeue itself does not know the state."""
    node_states: frozenset[str]
    """Every state and flag of a node that scontrol prints."""
    whole_nodes_field: str
    """squeue's field that says whether a job requested whole nodes."""
    whole_nodes: Mapping[str, bool]
    """The words in that field -> whether the job requested whole nodes (--exclusive). Slurm itself keeps the nodes of
    `--exclusive=user`, `mcs` and `topo` jobs apart; such jobs share nodes with some other jobs."""
    empty_tres_clears_gpus: bool
    """Whether an empty `TresPerNode` removes the GPUs of a pending job. Otherwise the job must request another GRES."""
    gpu_types_stay: bool
    """Whether a pending job that has asked for GPUs of a type needs nodes with that type for ever. Such a release also refuses to
    add a type to an untyped request, unless an update removes the request first."""
    cgroups_have_job_ids: bool
    """Whether the cgroup (v2) of a job is always named by its number. Otherwise only with CgroupJobIdPaths=yes."""


APART = frozenset({"USER", "MCS", "TOPO"})
"""The words in `whole_nodes_field` for jobs on whose nodes Slurm runs only some other jobs."""

_FIRST = Release(
    since=(22, 5),
    job_states=frozenset(
        {
            *(
                "PENDING",
                "RUNNING",
                "SUSPENDED",
                "COMPLETED",
                "CANCELLED",
                "FAILED",
                "TIMEOUT",
                "NODE_FAIL",
                "PREEMPTED",
            ),
            *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "COMPLETING", "CONFIGURING", "RESIZING", "REQUEUED", "REVOKED"),
            *("REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "STOPPED", "RESV_DEL_HOLD", "SIGNALING", "STAGE_OUT"),
        }
    ),
    node_states=frozenset(
        {
            *("DOWN", "IDLE", "ALLOCATED", "ERROR", "MIXED", "FUTURE", "UNKNOWN", "CLOUD", "COMPLETING", "DRAIN"),
            *("DYNAMIC_FUTURE", "DYNAMIC_NORM", "INVALID_REG", "FAIL", "MAINTENANCE", "POWER_DOWN", "POWER_UP"),
            *("POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "REBOOT_REQUESTED", "REBOOT_ISSUED", "RESERVED"),
            *("NOT_RESPONDING", "PLANNED", "PERFCTRS"),
            # What sinfo prints, and what scontrol's one-letter suffixes mean (`parse.STATE_SUFFIXES`).
            *("DRAINED", "DRAINING", "FAILING", "INVAL", "MAINT", "REBOOT"),
        }
    ),
    whole_nodes_field="OverSubscribe",
    whole_nodes={"NO": True, "YES": False, "OK": False, "USER": False, "MCS": False},
    empty_tres_clears_gpus=True,
    gpu_types_stay=True,
    cgroups_have_job_ids=True,
)
_23_02 = dataclasses.replace(_FIRST, since=(23, 2), empty_tres_clears_gpus=False, gpu_types_stay=False)
_24_05 = dataclasses.replace(
    _23_02,
    since=(24, 5),
    node_states=_23_02.node_states | {"BLOCKED"},
    whole_nodes={**_23_02.whole_nodes, "TOPO": False},
)
_25_05 = dataclasses.replace(_24_05, since=(25, 5), node_states=_24_05.node_states | {"EXTERNAL"})
_25_11 = dataclasses.replace(_25_05, since=(25, 11), job_states=_25_05.job_states | {"EXPEDITING"})
_26_05 = dataclasses.replace(
    _25_11,
    since=(26, 5),
    whole_nodes_field="Exclusive",
    whole_nodes={"NODE": True, "NO": False, "USER": False, "MCS": False, "TOPO": False},
    cgroups_have_job_ids=False,
)

RELEASES = (_FIRST, _23_02, _24_05, _25_05, _25_11, _26_05)
"""Releases that differ from the one before, from Slurm's sources. docs/developer/slurm-versions.md says how each was tried."""


def release(version: Version) -> Release:
    """What Slurm of this version says and can do. A version that is too new is taken for the newest one that is known."""
    return max((each for each in RELEASES if each.since <= version), key=lambda each: each.since, default=_FIRST)


def tested(version: Version) -> bool:
    """Whether the test suite has run with this release."""
    return version in TESTED


def shown(version: Version) -> str:
    """A version as Slurm writes it: 22.05."""
    return f"{version[0]}.{version[1]:02}"


Ability = Literal["shrink", "shrink-again"]
"""`shrink`: a running job with GPUs gives up whole nodes. `shrink-again`: it does so a second time."""

FILE = "abilities.json"


class Abilities:
    """The file `abilities.json` in `folder`.

    Args:
        folder: the spool.
        version: returns Slurm's release, such as (22, 5).
        accounting: returns whether slurmdbd registers jobs.
    """

    def __init__(self, folder: Path, version: Callable[[], Version], accounting: Callable[[], bool]) -> None:
        self._path = folder / FILE
        self._version, self._accounting = version, accounting

    def may(self, ability: Ability) -> bool:
        """Whether to try: yes, unless this version has refused before. Raises SlurmError."""
        return bool(self._read().get(self._key(), {}).get(ability, {}).get("works", True))

    def refused(self, ability: Ability, error: SlurmError) -> None:
        """Record that Slurm cannot do it, if the error means that. Raises SlurmError.

        A temporary failure says nothing about the next job. The exception is a run that has given up nodes before: Slurm 22.05
        without slurmdbd always answers it with an error that otherwise is temporary.
        """
        from penstock_slurm.gateway.errors import Refused, Unregistered  # the gateway reads the table above

        for_good = isinstance(error, Refused)
        if ability == "shrink-again" and isinstance(error, Unregistered):
            for_good = not self._accounting()
        if for_good:
            self.record(ability, False, str(error))

    def record(self, ability: Ability, works: bool, text: str = "") -> None:
        """Record the result, once for each version of Slurm. Raises SlurmError."""
        known, key = self._read(), self._key()
        if known.get(key, {}).get(ability, {}).get("works") == works:
            return
        known[key] = known.get(key, {}) | {ability: {"works": works, "text": text}}
        log.info("what Slurm can do", extra={"version": key, "ability": ability, "works": works, "text": text})
        try:
            save_whole(self._path, json.dumps(known, indent=1) + "\n")
        except OSError as error:
            log.warning("cannot record what Slurm can do", extra={"path": str(self._path), "text": str(error)})

    def _key(self) -> str:
        return ".".join(map(str, self._version()))

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}
