"""The first schema that a release has. Nothing has been released yet, so it is the one in `store.tables`.

The first change after a release copies `tables.py` as it was released beside this file, and this migration creates the tables of
that copy from then on: else a new store would have the change before its own migration makes it, and fails in the tests.
"""

from alembic import op

from penstock_scheduler.store.tables import leadership, metadata

revision = "0011"  # earlier numbers were development versions
down_revision = None


def upgrade() -> None:
    """Create the tables. Leadership begins with a term that is over."""
    metadata.create_all(op.get_bind())
    over = {
        "holder": "",
        "released": True,
        "successor": "",
        "version": "",
        "address": "",
        "since_s": 0.0,
        "beat_s": 0.0,
    }
    op.bulk_insert(leadership, [{"number": 0, "beat": 0} | over])
