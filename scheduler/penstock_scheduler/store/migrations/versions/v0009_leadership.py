"""Who leads, and who stands by."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the tables. Nobody has led yet."""
    leadership = op.create_table(
        "leadership",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            primary_key=True,
            autoincrement=False,
            comment="fencing number; the table has one row",
        ),
        sa.Column("beat", sa.BigInteger, nullable=False, comment="grows with each confirmation"),
        sa.Column("holder", _NAME, nullable=False),
        sa.Column("released", sa.Boolean, nullable=False),
        sa.Column("successor", _NAME, nullable=False, comment="who should lead next; empty: anybody"),
        sa.Column("version", _NAME, nullable=False),
        sa.Column("address", sa.Text, nullable=False, comment="URL of the leader's API"),
        sa.Column("since_s", sa.Float(53), nullable=False, comment="by the database's clock, for people"),
        sa.Column("beat_s", sa.Float(53), nullable=False, comment="by the database's clock, for people"),
    )
    nobody = {"holder": "", "released": True, "successor": "", "version": "", "address": ""}
    op.bulk_insert(leadership, [{"number": 0, "beat": 0, "since_s": 0.0, "beat_s": 0.0} | nobody])
    op.create_table(
        "standbys",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("version", _NAME, nullable=False),
        sa.Column("round", sa.BigInteger, comment="the round that it has loaded"),
        sa.Column("since_s", sa.Float(53), nullable=False, comment="by the database's clock"),
        sa.Column("seen_s", sa.Float(53), nullable=False, comment="by the database's clock"),
    )
