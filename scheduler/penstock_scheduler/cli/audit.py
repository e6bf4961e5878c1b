"""`penstock audit`: who did what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, ask, local_time, print_json, print_table
from penstock_scheduler.cli.options import FROM, TO, span_s

if TYPE_CHECKING:
    from penstock_scheduler.api.access_messages import AuditLine


def audit(
    from_: str | None = FROM,
    to: str | None = TO,
    user: str | None = typer.Option(None, "--user", help="Only what this user did."),
    action: str | None = typer.Option(
        None, "--action", help="Only actions that contain this text, such as cancel, drain or tokens."
    ),
    job: str | None = typer.Option(None, "--job", help="Only what was done with this job."),
    refused: bool = typer.Option(False, "--refused", help="Only what was refused."),
    limit: int = typer.Option(100, "--limit", min=1, help="Most lines to show."),
    as_json: bool = JSON,
) -> None:
    """Show who did what: the audit log, newest first. For operators.

    A request that changed something has a line, and so has one that was refused, and what penstockd did by itself.

    Example: penstock audit --from 2026-11-01 --user ada --action cancel
    """
    from_s, to_s = span_s(from_, to)
    lines = ask(
        lambda penstock: list(
            penstock.audit(from_s=from_s, to_s=to_s, user=user, action=action, job=job, refused=refused, limit=limit)
        )
    )
    if as_json:
        print_json(lines)
        return
    rows = [(local_time(line.time_s), _by(line), line.address or "-", _what(line)) for line in lines]
    print_table(("TIME", "BY", "FROM", "WHAT"), rows, "Nothing of this kind is in the audit log.")
    if len(lines) == limit:
        typer.echo(f"There may be more: these are the newest {limit}. Choose with --from and --to, or raise --limit.")


def _by(line: AuditLine) -> str:
    return f"{line.user} ({line.role})" if line.user else "penstockd"


def _what(line: AuditLine) -> str:
    method, _, path = line.action.partition(" ")
    action = method if path.startswith("/") else line.action
    if line.target.startswith("jobs/") and path == "/v1/jobs":
        action = "submit"
    text = f"{action} {line.target}" + (f": {line.text}" if line.text else "")
    if line.token:
        text += f" (token {line.token})"
    return text if line.allowed else f"REFUSED: {text}"
