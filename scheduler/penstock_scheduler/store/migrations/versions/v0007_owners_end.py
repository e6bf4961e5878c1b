"""Owners and keys of submissions are deleted some time after the history of their jobs."""

import json
import time

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_NAME = sa.String(255)


def upgrade() -> None:
    """Add the owner's job and the age of its row. Rows that are there count as written now."""
    absent = "absent: penstockd stopped while the job was submitted, or it was refused"
    op.add_column("owners", sa.Column("job", _NAME, comment=absent))
    comment = "when the row was written, or its job's history deleted"
    op.add_column("owners", sa.Column("noted_s", sa.Float(53), nullable=False, server_default="0", comment=comment))
    op.create_index("owners_of_jobs", "owners", ["job"])
    owners = sa.table("owners", *map(sa.column, ("user_name", "name", "view", "job", "noted_s")))
    db, c, now_s = op.get_bind(), owners.c, time.time()
    for row in db.execute(sa.select(c.user_name, c.name, c.view)).all():
        mine = sa.and_(c.user_name == row.user_name, c.name == row.name)
        db.execute(owners.update().where(mine).values(job=json.loads(row.view).get("job"), noted_s=now_s))
