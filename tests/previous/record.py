"""Records what a release sends and stores, for the next one: `python -m tests.previous.record`, from the repository's root.

It writes three files beside itself, with the packages that Python finds: `messages.json`, `schemas.json` and `store.sql`.
docs/developer/release.md says when to run it.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from penstock_scheduler.store.schema import FILE
from penstock_scheduler.store.sql import open_store
from tests.previous.samples import DOCUMENTS, JOB, MESSAGES, OUTCOME

HERE = Path(__file__).parent


def schemas() -> dict[str, Any]:
    """Name -> JSON Schema of each message and document."""
    types: list[Any] = [*dict.fromkeys(map(type, MESSAGES)), *DOCUMENTS]
    return {each.__name__: plain(TypeAdapter(each).json_schema(mode="validation")) for each in types}


def plain(schema: Any) -> Any:
    """A schema without its texts."""
    if isinstance(schema, dict):
        texts = {name for name in ("title", "description", "examples") if isinstance(schema.get(name), str | list)}
        return {name: plain(each) for name, each in schema.items() if name not in texts}
    return [plain(each) for each in schema] if isinstance(schema, list) else schema


def main() -> None:
    """Write the files."""
    from tests.scheduler.test_replay import record

    told = [{"kind": type(each).__name__, "text": each.model_dump_json()} for each in MESSAGES]
    (HERE / "messages.json").write_text(json.dumps(told, indent=1) + "\n")
    lines = [f'"{name}": {json.dumps(each, sort_keys=True)}' for name, each in schemas().items()]
    (HERE / "schemas.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")  # one line each
    with tempfile.TemporaryDirectory() as name:
        store = open_store(name, writer=True)
        store.save_round(record())
        store.save_jobs([JOB])
        store.add_outcomes(1.0, [OUTCOME])
        store.add_reports([each for each in MESSAGES if hasattr(each, "body")])
        store.close()
        with sqlite3.connect(Path(name) / FILE) as db:
            (HERE / "store.sql").write_text("\n".join(db.iterdump()) + "\n")


if __name__ == "__main__":
    main()
