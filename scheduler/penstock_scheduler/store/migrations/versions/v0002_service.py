"""What the service keeps: jobs, submissions, models, profiles, instances, ledger, audit, tokens, controls."""

import json
import zlib

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAME = sa.String(255)
_TIME = sa.Float(53)


def upgrade() -> None:
    """Make them, and sum up the rounds that are there."""
    op.add_column("rounds", sa.Column("summary", sa.Text, nullable=False, comment="RoundSummary", server_default="{}"))
    _summarise_rounds()
    op.create_table(
        "jobs",
        sa.Column("number", _ID, primary_key=True),
        sa.Column("job", _NAME, nullable=False, unique=True),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("name", sa.String(1000), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("key", _NAME),
        sa.Column("end_s", _TIME),
        sa.Column("view", sa.Text, nullable=False, comment="JobView"),
    )
    op.create_index("jobs_of_user", "jobs", ["user_name", "number"])
    op.create_index("jobs_in_state", "jobs", ["state", "number"])
    op.create_table(
        "submissions",
        sa.Column("user_name", _NAME, primary_key=True),
        sa.Column("key", _NAME, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_s", _TIME, nullable=False),
        sa.Column("job", _NAME, comment="absent: sbatch had not answered yet"),
    )
    op.create_table(
        "models",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("job", _NAME, nullable=False),
        sa.Column("time_s", _TIME, nullable=False),
        sa.Column("estimator", sa.Text, nullable=False, comment="AnyEstimator"),
    )
    op.create_index("models_of_job", "models", ["job", "id"])
    op.create_table(
        "profiles",
        sa.Column("user_name", _NAME, primary_key=True),
        sa.Column("job_name", _NAME, primary_key=True),
        sa.Column("gpu_type", _NAME, primary_key=True),
        sa.Column("profile", sa.Text, nullable=False, comment="Profile"),
    )
    op.create_table(
        "instances",
        sa.Column("instance", _NAME, primary_key=True),
        sa.Column("job", _NAME),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("launched_s", _TIME, nullable=False),
        sa.Column("ended_s", _TIME),
        sa.Column("record", sa.Text, nullable=False, comment="what the cloud's package keeps of it, JSON"),
    )
    op.create_table(
        "ledger",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("key", _NAME, nullable=False, unique=True),
        sa.Column("time_s", _TIME, nullable=False),
        sa.Column("account", _NAME, nullable=False),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("job", _NAME, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("amount", sa.Float(53), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_index("ledger_of_user", "ledger", ["user_name", "id"])
    op.create_index("ledger_of_account", "ledger", ["account", "time_s"])
    op.create_table(
        "audit",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("time_s", _TIME, nullable=False),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("action", _NAME, nullable=False),
        sa.Column("target", _NAME, nullable=False),
        sa.Column("allowed", sa.Boolean, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("token", _NAME, primary_key=True, comment="its id, which is no secret"),
        sa.Column("digest", sa.String(64), nullable=False, comment="SHA-256 of the secret, which has 256 random bits"),
        sa.Column("user_name", _NAME, nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("job", _NAME),
        sa.Column("created_s", _TIME, nullable=False),
        sa.Column("expires_s", _TIME, nullable=False),
        sa.Column("revoked", sa.Boolean, nullable=False),
        sa.Column("note", sa.String(200), nullable=False),
    )
    op.create_table(
        "controls",
        sa.Column("name", _NAME, primary_key=True),
        sa.Column("value", sa.Text, nullable=False, comment="JSON: what admins have set while the daemon ran"),
    )


def _summarise_rounds() -> None:
    """Write the summary of each round, from the JSON of that time rather than with code that changes."""
    connection = op.get_bind()
    for number, policy, packed in connection.execute(sa.text("SELECT round, policy, record FROM rounds")).all():
        record = json.loads(zlib.decompress(packed))
        plan = record["plan"]
        solve = plan.get("solve") or {}
        gap = None
        if solve:
            gap = abs(solve["objective"] - solve["bound"]) / max(abs(solve["objective"]), 1e-9)
        summary = {
            "round": number,
            "time_s": record["snapshot"]["time_s"],
            "policy": policy,
            "jobs": len(record["snapshot"]["jobs"]),
            "placed": len(plan["assignments"]),
            "waiting": len(plan["waiting"]),
            "seconds": record["seconds"],
            "gap": gap,
            "prices": plan["prices"],
        }
        connection.execute(
            sa.text("UPDATE rounds SET summary = :summary WHERE round = :round"),
            {"summary": json.dumps(summary), "round": number},
        )
