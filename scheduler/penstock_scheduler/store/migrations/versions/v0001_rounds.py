"""Rounds, outcomes of actions and reports: what the store began with."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAME = sa.String(255)


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "rounds",
        sa.Column("round", _ID, primary_key=True, autoincrement=False),
        sa.Column("time_s", sa.Float(53), nullable=False),
        sa.Column("policy", _NAME, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False, comment="RoundRecord as JSON, zlib"),
    )
    op.create_table(
        "outcomes",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("time_s", sa.Float(53), nullable=False),
        sa.Column("job", _NAME, nullable=False),
        sa.Column("line", sa.Text, nullable=False, comment="OutcomeLine"),
    )
    op.create_index("outcomes_of_job", "outcomes", ["job", "id"])
    op.create_table(
        "reports",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("job", _NAME, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("received_s", sa.Float(53), nullable=False),
        sa.Column("report", sa.Text, nullable=False, comment="Report"),
        sa.UniqueConstraint("job", "epoch", "sequence", name="reports_once"),
    )
