"""Why jobs wait, and samples of jobs and of the cluster."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_NAME = sa.String(255)
_TIME = sa.Float(53)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "waits",
        sa.Column("job", _NAME, primary_key=True),
        sa.Column("since_s", _TIME, primary_key=True),
        sa.Column("to_s", _TIME, comment="absent: it waits for this reason now"),
        sa.Column("name", sa.String(1000), nullable=False),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("account", _NAME, nullable=False),
        sa.Column("partition", _NAME, nullable=False),
        sa.Column("submit_s", _TIME, nullable=False),
        sa.Column("code", sa.String(32), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("needs", sa.Text, nullable=False),
        sa.Column("estimated_start_s", _TIME),
    )
    op.create_index("waits_by_end", "waits", ["to_s"])
    op.create_table(
        "samples",
        sa.Column("job", _NAME, primary_key=True),
        sa.Column("at", sa.BigInteger, primary_key=True, autoincrement=False, comment="s since 1970"),
        sa.Column(
            "step_s",
            sa.Integer,
            nullable=False,
            comment="0: as reported; else the length of what these are averages of",
        ),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("progress", _TIME, nullable=False),
        sa.Column("goodput", _TIME),
        sa.Column("expected", _TIME),
        sa.Column("batch", sa.Integer),
        sa.Column("busy", sa.SmallInteger, comment="utilisation in thousandths"),
        sa.Column("memory_mb", sa.Integer),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "series",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("at", sa.BigInteger, primary_key=True, autoincrement=False, comment="s since 1970"),
        sa.Column("step_s", sa.Integer, nullable=False, comment="as in samples"),
        sa.Column("value", _TIME, nullable=False),
        sqlite_with_rowid=False,
    )
