"""Which versions of Penstock can use the store: the number that an older version asks before it does."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the table. Each upgrade writes its row anew."""
    op.create_table(
        "compatibility",
        sa.Column(
            "from_revision",
            _NAME,
            primary_key=True,
            comment="the oldest schema whose versions can use the store; one row",
        ),
        sa.Column("version", _NAME, nullable=False, comment="the version of Penstock that brought the schema here"),
    )
