"""Large tables as Parquet, converted and checked, so that a trace is read quickly the second time.

The cache is `penstock/tables` in the user's XDG cache folder, never the folder of the trace. A table's key is a hash of the
file's content, of the files on which its conversion depends, of its format and of `VERSION`, so that a changed file is read
anew. Without pyarrow, or if the cache cannot be read or written, tables are always read from their files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock_scheduler.simulator.workloads.frames import WHOLE, read_spec
from penstock_scheduler.simulator.workloads.problems import Wrong
from penstock_scheduler.simulator.workloads.table import CHUNK_ROWS, Columns

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
"""Raise it when a conversion changes, so that older tables in caches are not used."""

LEAST_ROWS = CHUNK_ROWS
LEAST_BYTES = 64 * 1024
"""Smaller tables are not cached: they are read in a fraction of a second."""

MOST_BYTES = 1024 * 1024 * 1024
"""Larger files are not cached: they have more jobs than a workload may have."""

MOST_TABLES = 20
"""Tables in the cache. The ones that were written first are removed."""


@dataclass(slots=True)
class Part:
    """Converted rows of a table.

    Attributes:
        lines: the line in which each row begins.
        columns: columns of `frames.WORKLOAD`.
        valid: whether each row is a job, shape (rows,).
        wrong: line -> problem.
        left_out: reason -> rows that are not wanted.
    """

    lines: Sequence[int]
    columns: Columns
    valid: Sequence[bool]
    wrong: Mapping[int, Wrong]
    left_out: Counter[str]


def folder() -> Path:
    """The folder of the cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or ""
    # By the XDG specification a relative path is ignored.
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "penstock" / "tables"


def key_of(files: Sequence[Path], trace_format: str) -> str | None:
    """The key of a table that is converted from these files; None: there is no cache."""
    if importlib.util.find_spec("pyarrow") is None:
        return None
    digest = hashlib.sha256(json.dumps([VERSION, trace_format]).encode())
    try:
        if not LEAST_BYTES <= sum(file.stat().st_size for file in files) <= MOST_BYTES:
            return None
        for file in files:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    except OSError:
        return None
    return digest.hexdigest()


def load(key: str) -> Part | None:
    """The table with this key; None: it is not in the cache."""
    file = folder() / f"{key}.parquet"
    if not file.is_file():
        return None
    import pandas as pd  # takes a second to load, and reading settings loads this module

    try:
        table = pd.read_parquet(file, engine="pyarrow")
        left_out: Counter[str] = Counter(table.attrs["left_out"])
    except (OSError, ValueError, KeyError):
        return None
    columns: Columns = {}
    for name in table.columns:
        values = table[name]
        if values.dtype == np.float64:
            columns[name] = values.to_numpy()
        else:
            columns[name] = values.astype(object).where(values.notna(), None).tolist()
    lines = columns.pop("line")
    columns["spec"] = [read_spec(text) for text in columns["spec"]]
    return Part(list(lines), columns, [True] * len(table), {}, left_out)


def save(key: str, parts: Sequence[Part]) -> None:
    """Keep a table without problems. A cache that cannot be written is ignored."""
    import pandas as pd

    if sum(len(part.lines) for part in parts) < LEAST_ROWS:
        return
    table = pd.concat([_frame(part) for part in parts], ignore_index=True)
    table.attrs["left_out"] = dict(sum((part.left_out for part in parts), Counter()))
    where = folder()
    beside = where / f".{key}.{os.getpid()}"
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        table.to_parquet(beside, engine="pyarrow", index=False)
        beside.rename(where / f"{key}.parquet")
        tables = sorted(where.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
        for file in tables[:-MOST_TABLES]:
            file.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _frame(part: Part) -> pd.DataFrame:
    """The valid rows, with job specs as JSON."""
    import pandas as pd

    texts: dict[int, str] = {}
    for spec in part.columns["spec"]:
        if spec is not None and id(spec) not in texts:
            texts[id(spec)] = spec.model_dump_json(exclude_defaults=True)
    columns = part.columns | {"line": part.lines, "spec": [texts.get(id(spec)) for spec in part.columns["spec"]]}
    whole = {name: pd.Series(columns[name], dtype="Int64") for name in WHOLE if name in columns}
    return pd.DataFrame(columns | whole)[np.array(part.valid, dtype=np.bool_)]
