"""Commands for admins and operators: policy, rounds pause, rounds resume, drain, token."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock_scheduler.cli.ask import JSON, ask, local_time, print_json, print_table
from penstock_scheduler.cli.options import STAGE
from penstock_scheduler.people.errors import ConfigError

if TYPE_CHECKING:
    from penstock_scheduler.model.policy_choice import PolicyChoice

from typing import TYPE_CHECKING

from penstock_scheduler.cli.options import FROM, TO, span_s

if TYPE_CHECKING:
    from penstock_scheduler.api.access_messages import AuditLine


policy = typer.Typer(no_args_is_help=True, help="Show the policies, or choose the one that decides.")
token = typer.Typer(no_args_is_help=True, help="Create, list and revoke bearer tokens for the API. For admins.")


@policy.command("list")
def policies(as_json: bool = JSON) -> None:
    """Show the policies and their settings. An asterisk marks the one that decides."""
    found = ask(lambda penstock: penstock.policies())
    if as_json:
        print_json(found)
        return
    rows = [("*" if each.active else "", str(each), " ".join(_shown(each))) for each in found]
    print_table(("", "POLICY", "SETTINGS"), rows, "No policy is installed.")


def _shown(choice: PolicyChoice) -> Iterator[str]:
    """The settings, by policy and stage if there are several."""
    return _settings(choice.settings if len(choice.parts) > 1 else choice.settings[choice.name])


def _settings(settings: dict[str, Any]) -> Iterator[str]:
    """The settings that are set, as `penstock policy set` takes them."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from (f"{key}.{each}" for each in _settings(value))
        elif value is not None:
            yield f"{key}={json.dumps(value)}"


@policy.command("set")
def set_policy(
    name: str = typer.Argument(help="Name of the policy (see `penstock policy list`), or a settings file (*.toml)."),
    values: Annotated[
        list[str] | None,
        typer.Argument(help="Settings as in TOML: fairness_p=-1.0, or by policy and stage: sia.fairness_p=-1.0."),
    ] = None,
    stage: list[str] = STAGE,
    as_json: bool = JSON,
) -> None:
    """Choose the policy that decides from the next round on. For admins.

    The choice outlives a restart of penstockd. A setting that is not given has its value in the
    settings file.
    """
    for value in values or ():
        try:
            tomllib.loads(value)
        except tomllib.TOMLDecodeError:
            raise ConfigError(
                f"{value!r} is not KEY=VALUE as in TOML; put a text in quotes, such as solver='\"milp\"'"
            ) from None
    try:
        settings = tomllib.loads("\n".join(values or ()))  # together, so that sia.x=1 and sia.y=2 are both of sia
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings contradict each other: {error}; give each key once") from None
    from penstock_scheduler.cli.policies import choice_of, with_values

    choice = with_values(choice_of(name, stage), settings)
    change = ask(lambda penstock: penstock.set_policy(choice))
    if as_json:
        print_json(change)
    else:
        typer.echo(f"The policy {change} decides from the next round on.")


def pause(as_json: bool = JSON) -> None:
    """Pause the rounds. For admins.

    During the pause Penstock completes the actions under way, and starts, moves or stops no other jobs. Running jobs keep
    running. `penstock rounds resume` ends the pause.
    """
    _pause(paused=True, as_json=as_json)


def resume(as_json: bool = JSON) -> None:
    """Resume the rounds after `penstock rounds pause`. For admins."""
    _pause(paused=False, as_json=as_json)


def _pause(*, paused: bool, as_json: bool) -> None:
    answer = ask(lambda penstock: penstock.pause(paused=paused))
    if as_json:
        print_json(answer)
    elif answer.paused:
        typer.echo("Paused: no rounds are decided. Running jobs keep running.")
    else:
        typer.echo("Resumed: rounds are decided again.")


def drain(
    kind: str | None = typer.Argument(None, help="What to drain: node, gpu-type or partition."),
    name: str | None = typer.Argument(None, help="Name of what to drain. Without KIND and NAME, show what is drained."),
    why: str = typer.Option("", help="Reason to show to users."),
    end: bool = typer.Option(False, "--end", help="End the drain."),
    as_json: bool = JSON,
) -> None:
    """Drain GPUs for adaptive jobs, or show what is drained. For operators.

    KIND is node, gpu-type or partition. From the next round on, adaptive jobs are allocated no GPUs there. Under sia, pollux
    and gavel, the jobs that run there leave if they may be moved; under the queue policies they stay until they end. Slurm
    still starts other jobs there: to drain a node for all jobs, use scontrol.

    Example: penstock drain node n01 --why "a fan is broken"
    """
    if kind is None or name is None:
        if kind is not None or end:
            raise ConfigError("give both kind and name, such as: penstock drain node n01")
        _show_drains(as_json=as_json)
        return
    from pydantic import TypeAdapter, ValidationError

    from penstock_scheduler.api.messages import Drained, DrainOrder
    from penstock_scheduler.model.spec_errors import describe_errors

    try:
        order = DrainOrder(kind=TypeAdapter[Drained](Drained).validate_python(kind), name=name, why=why)
    except ValidationError as error:
        raise ConfigError("; ".join(describe_errors(error, DrainOrder))) from None
    if end:
        ask(lambda penstock: penstock.end_drain(order.kind, order.name))
        typer.echo("{}" if as_json else f"The {kind} {name} is not drained any more, from the next round on.")
        return
    made = ask(lambda penstock: penstock.drain(order))
    if as_json:
        print_json(made)
    else:
        typer.echo(
            f"The {kind} {name} is drained for adaptive jobs from the next round on. Under sia, pollux and gavel, jobs that "
            "run there leave if they may be moved. Otherwise they stay until they end."
        )


def _show_drains(*, as_json: bool) -> None:
    found = ask(lambda penstock: penstock.drains())
    if as_json:
        print_json(found)
        return
    rows = [(each.kind, each.name, local_time(each.since_s), each.by, each.why) for each in found]
    print_table(("KIND", "NAME", "SINCE", "BY", "REASON"), rows, "Nothing is drained.")


@token.command("create")
def create_token(
    user: str = typer.Option(..., help="User that the token stands for."),
    role: str = typer.Option("user", help="user, operator, admin, or job (only the reports of one job)."),
    job: str | None = typer.Option(None, help="With --role job: id of the job."),
    expires: float = typer.Option(30.0, min=0.01, help="Days after which the token expires."),
    note: str = typer.Option("", help="What the token is for."),
    as_json: bool = JSON,
) -> None:
    """Create a token. Its secret is shown only once."""
    from pydantic import TypeAdapter, ValidationError

    from penstock_scheduler.api.access_messages import TokenOrder
    from penstock_scheduler.api.messages import Role
    from penstock_scheduler.model.spec_errors import describe_errors

    try:
        order = TokenOrder(
            user=user,
            role=TypeAdapter[Role](Role).validate_python(role),
            job=job,
            expires_s=time.time() + expires * 86400,
            note=note,
        )
    except ValidationError as error:
        raise ConfigError("; ".join(describe_errors(error, TokenOrder))) from None
    made = ask(lambda penstock: penstock.create_token(order))
    if as_json:
        print_json(made)
        return
    view = made.view
    typer.echo(made.token)
    typer.echo(
        f"Token {view.id} for {view.user} with the role {view.role}, valid until {local_time(view.expires_s)}. "
        "Store it now: it is not shown again.",
        err=True,
    )


@token.command("list")
def list_tokens(as_json: bool = JSON) -> None:
    """Show all tokens, without their secrets."""
    found = ask(lambda penstock: penstock.tokens())
    if as_json:
        print_json(found)
        return
    now_s = time.time()
    rows = [
        (
            each.id,
            each.user,
            each.role,
            "revoked" if each.revoked else "expired" if each.expires_s < now_s else local_time(each.expires_s),
            each.note,
        )
        for each in found
    ]
    print_table(("ID", "USER", "ROLE", "VALID UNTIL", "NOTE"), rows, "There are no tokens.")


@token.command("revoke")
def revoke_token(token_id: str = typer.Argument(help="Id as in `penstock token list`."), as_json: bool = JSON) -> None:
    """Revoke a token at once."""
    revoked = ask(lambda penstock: penstock.revoke_token(token_id))
    if as_json:
        print_json(revoked)
    else:
        typer.echo(f"Token {revoked.id} of {revoked.user} is revoked.")


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
