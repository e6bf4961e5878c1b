"""Rounds may be stored as their difference from another round. Rounds that are there are whole, and stay so."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the column. A version that does not know it writes whole rounds, which need none."""
    comment = "the round from which the record is a difference; absent: the record is whole"
    op.add_column("rounds", sa.Column("key_round", sa.BigInteger, comment=comment))
