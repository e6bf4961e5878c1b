"""Owners of jobs outside Slurm, such as tasks of Airflow."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "owners",
        sa.Column("user_name", _NAME, primary_key=True),
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("view", sa.Text, nullable=False, comment="OwnerView"),
    )
