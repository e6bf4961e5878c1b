"""`airflow penstock check`: is this Airflow set up for penstockd? From Airflow 3.2 on."""

from __future__ import annotations

from typing import Any


def get_penstock_cli_commands() -> list[Any]:
    """The provider's commands. Airflow calls this at each start of its command line, so imports are inside."""
    from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand, lazy_load_command

    conn_id = Arg(("--conn-id",), default="penstock_default", help="The connection (default: penstock_default)")
    check = ActionCommand(
        name="check",
        help="Ask penstockd whether it accepts a connection's token, and look at the settings of PenstockExecutor",
        func=lazy_load_command("airflow_provider_penstock.cli.check.check"),
        args=(conn_id,),
    )
    return [GroupCommand(name="penstock", help="Penstock: adaptive GPU jobs on Slurm", subcommands=(check,))]
