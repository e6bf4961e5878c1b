"""What this Slurm can do to running jobs. Each ability is tried when it is first needed. A file keeps the result by Slurm's
version."""

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
"""`shrink`: a running job with GPUs gives up whole nodes. `shrink-again`: it does so a second time."""

FILE = "abilities.json"


class Abilities:
    """The file `abilities.json` in `folder`.

    Args:
        folder: the spool.
        version: returns Slurm's release, such as (22, 5).
    """

    def __init__(self, folder: Path, version: Callable[[], tuple[int, int]]) -> None:
        self._path = folder / FILE
        self._version = version

    def may(self, ability: Ability) -> bool:
        """Whether to try: yes, unless this version has refused before. Raises SlurmError."""
        return bool(self._read().get(self._key(), {}).get(ability, {}).get("works", True))

    def refused(self, ability: Ability, error: SlurmError) -> None:
        """Record that Slurm cannot do it, if the error means that. Raises SlurmError.

        A temporary failure says nothing about the next job. The exception is a run that has given up nodes before: Slurm 22.05
        without slurmdbd always answers it with an error that otherwise is temporary.
        """
        if isinstance(error, Refused) or (ability == "shrink-again" and isinstance(error, Unregistered)):
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
