"""Browser sessions; and in the audit log, where a request came from and with which token."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_NAME = sa.String(255)


def upgrade() -> None:
    """Make the table and the columns."""
    op.create_table(
        "sessions",
        sa.Column("session", _NAME, primary_key=True, comment="its id, which is no secret"),
        sa.Column("digest", sa.String(64), nullable=False, comment="SHA-256 of the secret in the cookie"),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("token", _NAME, comment="id of the token of the log-in"),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("expires_s", sa.Float(53), nullable=False),
        sa.Column("address", _NAME, nullable=False),
    )
    for name, comment in (
        ("address", "IP address; empty: the Unix socket or penstockd"),
        ("token", "its id, which is no secret"),
    ):
        op.add_column("audit", sa.Column(name, _NAME, nullable=False, server_default="", comment=comment))
