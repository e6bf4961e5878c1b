"""What this Slurm can do to running jobs: tried once, where it is first wanted, and kept in a file by Slurm's version."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from penstock_profiles.files import save_whole
from penstock_slurm.gateway import Refused, SlurmError, Unregistered

log = logging.getLogger(__name__)

Ability = Literal["shrink", "shrink-again"]
"""`shrink`: a running job with GPUs gives whole nodes back. `shrink-again`: one that has done so does it a second time."""

FILE = "abilities.json"


class Abilities:
    """The file `abilities.json` in `folder`.

    Args:
        folder: the spool.
        version: asks Slurm for its release, such as (22, 5).
    """

    def __init__(self, folder: Path, version: Callable[[], tuple[int, int]]) -> None:
        self._path = folder / FILE
        self._version = version

    def may(self, ability: Ability) -> bool:
        """Whether to try: yes, unless this version was seen to refuse. Raises SlurmError."""
        return bool(self._read().get(self._key(), {}).get(ability, {}).get("works", True))

    def refused(self, ability: Ability, error: SlurmError) -> None:
        """Keep that it cannot, if the error says so. Raises SlurmError.

        That Slurm could not just now says nothing of the next job; but of a run that has given nodes back, 22.05 without slurmdbd
        says so for ever.
        """
        if isinstance(error, Refused) or (ability == "shrink-again" and isinstance(error, Unregistered)):
            self.record(ability, False, str(error))

    def record(self, ability: Ability, works: bool, text: str = "") -> None:
        """Keep what came of it, once for each version. Raises SlurmError."""
        known, key = self._read(), self._key()
        if known.get(key, {}).get(ability, {}).get("works") == works:
            return
        known[key] = known.get(key, {}) | {ability: {"works": works, "text": text}}
        log.info("ability of Slurm", extra={"version": key, "ability": ability, "works": works, "text": text})
        try:
            save_whole(self._path, json.dumps(known, indent=1) + "\n")
        except OSError as error:
            log.warning("cannot keep what Slurm can do", extra={"path": str(self._path), "text": str(error)})

    def _key(self) -> str:
        return ".".join(map(str, self._version()))

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}
