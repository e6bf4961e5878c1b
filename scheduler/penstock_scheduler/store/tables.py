"""The tables of the store, as the newest migration leaves them.

History is only appended: outcomes, reports, models, audit, ledger. The other tables hold newest states. JSON is kept
as text, in the form of the pydantic model that the column's comment names.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)

REVISION = "0011"
"""The newest migration."""

COMPATIBLE_FROM = "0011"
"""The oldest schema whose versions of Penstock can use a store with the schema `REVISION`, and may run while it is upgraded.
It is raised to `REVISION` by a migration that takes something away, and by a document that older versions cannot read.
docs/developer/release.md has the rule."""

metadata = MetaData()

_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only an INTEGER PRIMARY KEY by itself
_NAME = String(255)

rounds = Table(
    "rounds",
    metadata,
    Column("round", _ID, primary_key=True, autoincrement=False),
    Column("time_s", Float(53), nullable=False),
    Column("policy", _NAME, nullable=False),
    Column("record", LargeBinary, nullable=False, comment="RoundRecord as JSON, zlib"),
    Column("summary", Text, nullable=False, comment="RoundSummary", server_default="{}"),
    Column(
        "key_round", BigInteger, comment="the round from which the record is a difference; absent: the record is whole"
    ),
)

outcomes = Table(
    "outcomes",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("time_s", Float(53), nullable=False),
    Column("job", _NAME, nullable=False),
    Column("line", Text, nullable=False, comment="OutcomeLine"),
    Index("outcomes_of_job", "job", "id"),
)

reports = Table(
    "reports",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("job", _NAME, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("received_s", Float(53), nullable=False),
    Column("report", Text, nullable=False, comment="Report"),
    UniqueConstraint("job", "epoch", "sequence", name="reports_once"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("number", _ID, primary_key=True),
    Column("job", _NAME, nullable=False, unique=True),
    Column("user_name", _NAME, nullable=False),
    Column("name", String(1000), nullable=False),
    Column("state", String(32), nullable=False),
    Column("key", _NAME),
    Column("end_s", Float(53)),
    Column("view", Text, nullable=False, comment="JobView"),
    Column("changed", BigInteger, nullable=False, server_default="0", comment="grows with every change of any job"),
    Index("jobs_of_user", "user_name", "number"),
    Index("jobs_in_state", "state", "number"),
    Index("jobs_changed", "changed"),
)

figures = Table(
    "figures",
    metadata,
    Column("job", _NAME, primary_key=True),
    Column("changed", BigInteger, nullable=False),
    Column("figures", Text, nullable=False, comment="Figures"),
    Index("figures_changed", "changed"),
)

published = Table(
    "published",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("value", Text, nullable=False, comment="JSON: what API processes need besides jobs and rounds"),
)

submissions = Table(
    "submissions",
    metadata,
    Column("user_name", _NAME, primary_key=True),
    Column("key", _NAME, primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("job", _NAME, comment="absent: sbatch had not answered yet"),
)

owners = Table(
    "owners",
    metadata,
    Column("user_name", _NAME, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("view", Text, nullable=False, comment="OwnerView"),
    Column("job", _NAME, comment="absent: penstockd stopped while the job was submitted, or it was refused"),
    Column(
        "noted_s",
        Float(53),
        nullable=False,
        server_default="0",
        comment="when the row was written, or its job's history deleted",
    ),
    Index("owners_of_jobs", "job"),
)

allocations = Table(
    "allocations",
    metadata,
    Column("job", _NAME, primary_key=True),
    Column("from_s", Float(53), primary_key=True),
    Column("to_s", Float(53), comment="absent: the job holds these GPUs"),
    Column("exact", Boolean, nullable=False, comment="whether the end is the cluster's own"),
    Column("user_name", _NAME, nullable=False),
    Column("account", _NAME, nullable=False),
    Column("partition", _NAME, nullable=False),
    Column("gpu_type", _NAME, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("nodes", Text, nullable=False, comment="JSON: node -> GPUs"),
    Column("gpu_ids", Text, comment="JSON: node -> indices of the GPUs"),
    Column("place", String(32), nullable=False, comment="site or cloud"),
    Column("shared", Boolean, nullable=False),
    Column("run_s", Float(53), nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("suspended_s", Float(53), nullable=False),
    Column("cause", Text, nullable=False),
    Column("end_code", String(32), nullable=False),
    Column("end_text", Text, nullable=False),
    Index("allocations_by_end", "to_s"),
)

waits = Table(
    "waits",
    metadata,
    Column("job", _NAME, primary_key=True),
    Column("since_s", Float(53), primary_key=True),
    Column("to_s", Float(53), comment="absent: it waits for this reason now"),
    Column("name", String(1000), nullable=False),
    Column("user_name", _NAME, nullable=False),
    Column("account", _NAME, nullable=False),
    Column("partition", _NAME, nullable=False),
    Column("submit_s", Float(53), nullable=False),
    Column("code", String(32), nullable=False),
    Column("text", Text, nullable=False),
    Column("needs", Text, nullable=False),
    Column("estimated_start_s", Float(53)),
    Index("waits_by_end", "to_s"),
)

samples = Table(
    "samples",
    metadata,
    Column("job", _NAME, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False, comment="s since 1970"),
    Column("step_s", Integer, nullable=False, comment="0: as reported; else the length of what these are averages of"),
    Column("gpus", Integer, nullable=False),
    Column("progress", Float(53), nullable=False),
    Column("goodput", Float(53)),
    Column("expected", Float(53)),
    Column("batch", Integer),
    Column("busy", SmallInteger, comment="utilisation in thousandths"),
    Column("memory_mb", Integer),
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False, comment="s since 1970"),
    Column("step_s", Integer, nullable=False, comment="as in samples"),
    Column("value", Float(53), nullable=False),
    sqlite_with_rowid=False,
)

models = Table(
    "models",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("job", _NAME, nullable=False),
    Column("time_s", Float(53), nullable=False),
    Column("estimator", Text, nullable=False, comment="AnyEstimator"),
    Index("models_of_job", "job", "id"),
)

profiles = Table(
    "profiles",
    metadata,
    Column("user_name", _NAME, primary_key=True),
    Column("job_name", _NAME, primary_key=True),
    Column("gpu_type", _NAME, primary_key=True),
    Column("profile", Text, nullable=False, comment="Profile"),
)

instances = Table(
    "instances",
    metadata,
    Column("instance", _NAME, primary_key=True),
    Column("job", _NAME),
    Column("state", String(32), nullable=False),
    Column("launched_s", Float(53), nullable=False),
    Column("ended_s", Float(53)),
    Column("record", Text, nullable=False, comment="what the cloud's package keeps of it, JSON"),
)

ledger = Table(
    "ledger",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("key", _NAME, nullable=False, unique=True),
    Column("time_s", Float(53), nullable=False),
    Column("account", _NAME, nullable=False),
    Column("user_name", _NAME, nullable=False),
    Column("job", _NAME, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("amount", Float(53), nullable=False),
    Column("text", Text, nullable=False),
    Index("ledger_of_user", "user_name", "id"),
    Index("ledger_of_account", "account", "time_s"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("time_s", Float(53), nullable=False),
    Column("user_name", _NAME, nullable=False),
    Column("role", String(32), nullable=False),
    Column("action", _NAME, nullable=False),
    Column("target", _NAME, nullable=False),
    Column("allowed", Boolean, nullable=False),
    Column("text", Text, nullable=False),
    Column(
        "address", _NAME, nullable=False, server_default="", comment="IP address; empty: the Unix socket or penstockd"
    ),
    Column("token", _NAME, nullable=False, server_default="", comment="its id, which is no secret"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("token", _NAME, primary_key=True, comment="its id, which is no secret"),
    Column("digest", String(64), nullable=False, comment="SHA-256 of the secret, which has 256 random bits"),
    Column("user_name", _NAME, nullable=False),
    Column("role", String(32), nullable=False),
    Column("job", _NAME),
    Column("created_s", Float(53), nullable=False),
    Column("expires_s", Float(53), nullable=False),
    Column("revoked", Boolean, nullable=False),
    Column("note", String(200), nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session", _NAME, primary_key=True, comment="its id, which is no secret"),
    Column("digest", String(64), nullable=False, comment="SHA-256 of the secret in the cookie"),
    Column("user_name", _NAME, nullable=False),
    Column("token", _NAME, comment="id of the token of the log-in"),
    Column("created_s", Float(53), nullable=False),
    Column("expires_s", Float(53), nullable=False),
    Column("address", _NAME, nullable=False),
)

controls = Table(
    "controls",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("value", Text, nullable=False, comment="JSON: what admins have set while the daemon ran"),
)

leadership = Table(
    "leadership",
    metadata,
    Column("number", _ID, primary_key=True, autoincrement=False, comment="fencing number; the table has one row"),
    Column("beat", BigInteger, nullable=False, comment="grows with each confirmation"),
    Column("holder", _NAME, nullable=False),
    Column("released", Boolean, nullable=False),
    Column("successor", _NAME, nullable=False, comment="who should lead next; empty: anybody"),
    Column("version", _NAME, nullable=False),
    Column("address", Text, nullable=False, comment="URL of the leader's API"),
    Column("since_s", Float(53), nullable=False, comment="by the database's clock, for people"),
    Column("beat_s", Float(53), nullable=False, comment="by the database's clock, for people"),
)

standbys = Table(
    "standbys",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("version", _NAME, nullable=False),
    Column("round", BigInteger, comment="the round that it has loaded"),
    Column("since_s", Float(53), nullable=False, comment="by the database's clock"),
    Column("seen_s", Float(53), nullable=False, comment="by the database's clock"),
)

compatibility = Table(
    "compatibility",
    metadata,
    Column(
        "from_revision", _NAME, primary_key=True, comment="the oldest schema whose versions can use the store; one row"
    ),
    Column("version", _NAME, nullable=False, comment="the version of Penstock that brought the schema here"),
)
