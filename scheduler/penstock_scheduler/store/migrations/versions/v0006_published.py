"""What penstockd publishes for API processes of their own, and the order in which jobs have changed."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the tables. Jobs that are there have not changed since any event."""
    comment = "grows with every change of any job"
    op.add_column("jobs", sa.Column("changed", sa.BigInteger, nullable=False, server_default="0", comment=comment))
    op.create_index("jobs_changed", "jobs", ["changed"])
    op.create_table(
        "figures",
        sa.Column("job", _NAME, primary_key=True),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.Column("figures", sa.Text, nullable=False, comment="Figures"),
    )
    op.create_index("figures_changed", "figures", ["changed"])
    op.create_table(
        "published",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("value", sa.Text, nullable=False, comment="JSON: what API processes need besides jobs and rounds"),
    )
