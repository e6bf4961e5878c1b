"""How much slower co-located jobs run: tables of pairs, a prior for pairs without a measurement, and learning from running
jobs.

The *share* of a job in a pair is its throughput beside the other job, divided by its throughput alone on the same GPU type. It
is in [0, 1]. With time slices, the shares of two jobs add up to 1, so packing them pays if the sum is above 1 (Gandiva, section
3.3). Two jobs that do not fit into the GPU's memory together have share 0.

A pair is known from a table, from a measurement or not at all. For an unknown pair, the prior comes from the GPU's utilisation
by each job alone: if the two add up to at most the whole GPU, neither job slows down; if to more, both slow down in proportion.

Tables have the form of Gavel's measurements (stanford-futuredata/gavel, `simulation_throughputs.json`): GPU type -> job kind ->
`"null"`: iterations/s alone; other kind: `[mine, theirs]` in iterations/s when they share one GPU.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, TypeAdapter, ValidationError

PRIOR_WEIGHT = 1.0
"""Weight of a pair's prior, in measurements."""

MOST_WEIGHT = 8.0
"""Number of measurements that a pair's mean covers. Older ones are forgotten, since jobs change as they train."""


class ColocationError(ValueError):
    """A table of pairs cannot be read, or a measurement is out of range. The message names the entry and the remedy."""


class Pair(BaseModel):
    """The known share of one kind of job beside another on one GPU type."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    share: NonNegativeFloat
    """Throughput beside the other job, divided by throughput alone."""
    weight: NonNegativeFloat = Field(default=PRIOR_WEIGHT)
    """Number of measurements behind `share`. A table counts as `PRIOR_WEIGHT` of them; 0: a guess."""


class Colocation:
    """Shares of pairs of job kinds, by GPU type. Jobs of one kind run alike: a model family, a script, or a single job.

    Args:
        known: (GPU type, mine, theirs) -> the known share of `mine` beside `theirs`.
        utilisation: (GPU type, kind) -> share of the GPU that it uses alone, in [0, 1], for the prior.
    """

    def __init__(
        self,
        known: Mapping[tuple[str, str, str], Pair] | None = None,
        utilisation: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        self._known = {key: pair.model_copy() for key, pair in (known or {}).items()}
        self._utilisation = dict(utilisation or {})
        self._of_table: set[tuple[str, str, str]] = set()
        """Pairs from another table that have not been measured since."""

    def over(self, table: Colocation) -> Colocation:
        """These pairs, and a table's values for all other pairs. A table's value has the weight `PRIOR_WEIGHT`, and `dump`
        omits it until the pair is measured."""
        found = Colocation(self._known, self._utilisation)
        for key, pair in table._known.items():
            if key not in self._known:
                found._known[key] = Pair(share=pair.share, weight=min(pair.weight, PRIOR_WEIGHT))
                found._of_table.add(key)
        return found

    def share(self, gpu_type: str, mine: str, theirs: str) -> float | None:
        """Expected share of `mine` beside `theirs`; None: unknown."""
        pair = self._known.get((gpu_type, mine, theirs))
        return pair.share if pair is not None else self._prior(gpu_type, mine, theirs)

    def total(self, gpu_type: str, one: str, other: str) -> float | None:
        """Sum of the two shares. Above 1, packing beats time slices; 0: the jobs do not fit. None: unknown."""
        shares = [self.share(gpu_type, one, other), self.share(gpu_type, other, one)]
        if None in shares:
            return None
        return 0.0 if 0.0 in shares else sum(share for share in shares if share is not None)

    def measured(self, gpu_type: str, one: str, other: str) -> bool:
        """Whether both were measured beside each other, or are in a table."""
        return (gpu_type, one, other) in self._known and (gpu_type, other, one) in self._known

    def observe(self, gpu_type: str, mine: str, theirs: str, share: float) -> None:
        """Learn that `mine` ran at `share` of its speed alone while beside `theirs`.

        The mean covers at most `MOST_WEIGHT` measurements, so that it follows changes. A pair that no longer fits (share 0)
        counts at once.

        Raises:
            ColocationError: `share` is negative or not a number.
        """
        if not 0 <= share < float("inf"):
            raise ColocationError(
                f"{mine} beside {theirs} on {gpu_type}: the share {share} is out of range; give one from 0 to 1"
            )
        self._of_table.discard((gpu_type, mine, theirs))
        pair = self._known.get((gpu_type, mine, theirs), Pair(share=share, weight=0.0))
        if share == 0 or pair.share == 0:
            self._known[gpu_type, mine, theirs] = Pair(share=share, weight=1.0)
            return
        weight = min(pair.weight, MOST_WEIGHT - 1)
        mean = (pair.share * weight + share) / (weight + 1)
        self._known[gpu_type, mine, theirs] = Pair(share=mean, weight=weight + 1)

    def observe_alone(self, gpu_type: str, kind: str, utilisation: float) -> None:
        """Learn the share of the GPU that a kind uses alone. Raises ColocationError if it is not in [0, 1]."""
        if not 0 <= utilisation <= 1:
            raise ColocationError(
                f"{kind} on {gpu_type}: the utilisation {utilisation} is out of range; give one from 0 to 1"
            )
        self._utilisation[gpu_type, kind] = utilisation

    def utilisation(self, gpu_type: str, kind: str) -> float | None:
        """Share of the GPU that the kind uses alone; None: not measured."""
        return self._utilisation.get((gpu_type, kind))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types with known pairs."""
        return tuple(dict.fromkeys(gpu_type for gpu_type, _, _ in self._known))

    def kinds(self, gpu_type: str) -> tuple[str, ...]:
        """Kinds with a known pair on the type, in the order of the table."""
        return tuple(dict.fromkeys(mine for of, mine, _ in self._known if of == gpu_type))

    def utilisation_by_itself(self, gpu_type: str, kind: str) -> float | None:
        """The utilisation with which the prior explains the kind beside itself, in [0.5, 1]; None: the kind has no such
        measurement.

        It stands in for the utilisation, which tables do not contain.
        """
        total = self.total(gpu_type, kind, kind) if self.measured(gpu_type, kind, kind) else None
        return None if total is None else min(max(1 / (total or 1.0), 0.5), 1.0)

    def on_types(self, types: Mapping[str, str]) -> Colocation:
        """The same pairs under other names of GPU types: name -> the type here that stands for it."""
        return Colocation(
            {(name, a, b): pair for name, of in types.items() for (t, a, b), pair in self._known.items() if t == of},
            {(name, k): used for name, of in types.items() for (t, k), used in self._utilisation.items() if t == of},
        )

    def _prior(self, gpu_type: str, mine: str, theirs: str) -> float | None:
        used = [self._utilisation.get((gpu_type, kind)) for kind in (mine, theirs)]
        if used[0] is None or used[1] is None:
            return None
        return 1.0 / max(used[0] + used[1], 1.0)

    def dump(self) -> str:
        """All pairs as JSON, for `load`; see `over`."""
        return _ADAPTER.dump_json(
            _Stored(
                pairs=[
                    _StoredPair(gpu_type=t, mine=a, theirs=b, **pair.model_dump())
                    for (t, a, b), pair in sorted(self._known.items())
                    if (t, a, b) not in self._of_table
                ],
                alone=[
                    _StoredAlone(gpu_type=t, kind=k, utilisation=u) for (t, k), u in sorted(self._utilisation.items())
                ],
            ),
            indent=1,
        ).decode()

    @classmethod
    def load(cls, text: str | bytes, where: str) -> Colocation:
        """Read the output of `dump`. Raises ColocationError, which names `where` and the field."""
        try:
            stored = _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ColocationError(
                f"{where}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}; give a file that penstock wrote"
            ) from None
        return cls(
            {(p.gpu_type, p.mine, p.theirs): Pair(share=p.share, weight=p.weight) for p in stored.pairs},
            {(a.gpu_type, a.kind): a.utilisation for a in stored.alone},
        )


def read_table(path: Path, gpu_types: Mapping[str, str] | None = None) -> Colocation:
    """A table in Gavel's form.

    A kind with rate 0 alone does not run on that type, and is left out.

    Args:
        path: the JSON file, compressed with gzip or not.
        gpu_types: the table's name of a GPU type -> ours; types that are not in it are left out. None: all, as they are.

    Raises:
        ColocationError: not such a table; names the entry.
        OSError: the file cannot be read.
    """
    return _table(path, _json(path), gpu_types)


def read_pairs(path: Path) -> Colocation:
    """Read the pairs in a file: a table in Gavel's form, or the output of `dump`, compressed with gzip or not.

    Raises:
        ColocationError: it is neither; names the entry.
        OSError: the file cannot be read.
    """
    found = _json(path)
    if isinstance(found, dict) and isinstance(found.get("pairs"), list):
        return Colocation.load(json.dumps(found), str(path))
    return _table(path, found, None)


def _json(path: Path) -> object:
    packed = path.read_bytes()
    try:
        return json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ColocationError(f"{path}: not JSON: {error}") from None


def _table(path: Path, table: object, gpu_types: Mapping[str, str] | None) -> Colocation:
    if not isinstance(table, dict):
        raise ColocationError(
            f"{path}: not a table of pairs; expected GPU type -> kind -> other kind -> [mine, theirs]"
        )
    known: dict[tuple[str, str, str], Pair] = {}
    names = {name: name for name in table} if gpu_types is None else gpu_types
    for theirs_type, ours in names.items():
        kinds = table.get(theirs_type)
        if not isinstance(kinds, dict):
            raise ColocationError(f"{path}: it has no GPU type {theirs_type!r}; it has {', '.join(sorted(table))}")
        if wrong := next((kind for kind, row in kinds.items() if not isinstance(row, dict)), None):
            raise ColocationError(
                f"{path}: {theirs_type}, {wrong}: expected an object of other kinds -> [mine, theirs]"
            )
        absent = {kind for kind, row in kinds.items() if row.get("null") == 0}  # the pair does not run on this type
        for mine, row in kinds.items():
            for theirs, both in row.items() if mine not in absent else ():
                if theirs != "null" and theirs not in absent:
                    known[ours, mine, theirs] = Pair(
                        share=_share(path, f"{theirs_type}, {mine} beside {theirs}", row, both)
                    )
    return Colocation(known)


def _share(path: Path, entry: str, row: Mapping[str, Any], both: object) -> float:
    alone = row.get("null")
    if not isinstance(alone, int | float) or alone <= 0:
        raise ColocationError(f'{path}: {entry}: the rate alone is missing; expected a positive number under "null"')
    if not isinstance(both, list) or len(both) != 2 or not all(isinstance(r, int | float) and r >= 0 for r in both):
        raise ColocationError(f"{path}: {entry}: expected two rates, [mine, theirs], found {both!r}")
    return float(both[0] / alone)


class _StoredPair(Pair):
    gpu_type: str
    mine: str
    theirs: str


class _StoredAlone(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gpu_type: str
    kind: str
    utilisation: float = Field(ge=0, le=1)


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pairs: list[_StoredPair] = []
    alone: list[_StoredAlone] = []


_ADAPTER = TypeAdapter(_Stored)
