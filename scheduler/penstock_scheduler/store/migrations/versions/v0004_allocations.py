"""Allocation spans: which job held which GPUs when."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_NAME = sa.String(255)
_TIME = sa.Float(53)


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "allocations",
        sa.Column("job", _NAME, primary_key=True),
        sa.Column("from_s", _TIME, primary_key=True),
        sa.Column("to_s", _TIME, comment="absent: the job holds these GPUs"),
        sa.Column("exact", sa.Boolean, nullable=False, comment="whether the end is the cluster's own"),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("account", _NAME, nullable=False),
        sa.Column("partition", _NAME, nullable=False),
        sa.Column("gpu_type", _NAME, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("nodes", sa.Text, nullable=False, comment="JSON: node -> GPUs"),
        sa.Column("gpu_ids", sa.Text, comment="JSON: node -> indices of the GPUs"),
        sa.Column("place", sa.String(32), nullable=False, comment="site or cloud"),
        sa.Column("shared", sa.Boolean, nullable=False),
        sa.Column("run_s", _TIME, nullable=False),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("suspended_s", _TIME, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("end_code", sa.String(32), nullable=False),
        sa.Column("end_text", sa.Text, nullable=False),
    )
    op.create_index("allocations_by_end", "allocations", ["to_s"])
