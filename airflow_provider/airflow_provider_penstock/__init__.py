"""Adaptive GPU jobs on Slurm as Airflow tasks: a client of penstockd's HTTP API, see docs/user/airflow.md."""

from typing import Any

__version__ = "0.1.0"

EXECUTOR_OPTIONS = {
    name: {"description": text, "version_added": "0.1.0", "type": kind, "example": example, "default": default}
    for name, kind, default, example, text in (
        (
            "conn_id",
            "string",
            "penstock_default",
            None,
            "The connection to penstockd. Jobs run as the user of its token.",
        ),
        ("python", "string", "python3", "/shared/airflow/bin/python", "An interpreter on the nodes that has Airflow."),
        ("output_file", "string", None, "/shared/logs/airflow-%j.out", "Output of the jobs. Absent: Slurm's default."),
        ("environment", "string", None, '{"AIRFLOW_HOME": "/shared/airflow/home"}', "Variables of the jobs, as JSON."),
        ("poll_interval_s", "float", "2.0", None, "Seconds between two requests for the states of jobs."),
    )
}
"""Section `[penstock_executor]` of Airflow's settings."""


def get_provider_info() -> dict[str, Any]:
    """The provider's information for Airflow's entry point `apache_airflow_provider`, valid by provider_info.schema.json."""

    def modules(kind: str) -> list[dict[str, Any]]:
        return [{"integration-name": "Penstock", "python-modules": [f"airflow_provider_penstock.{kind}.penstock"]}]

    return {
        "package-name": "airflow-provider-penstock",
        "name": "Penstock",
        "description": "Adaptive GPU jobs on Slurm, through penstockd's HTTP API.",
        "integrations": [{"integration-name": "Penstock", "tags": ["service"]}],
        "operators": [
            {
                "integration-name": "Penstock",
                "python-modules": [f"airflow_provider_penstock.operators.{name}" for name in ("penstock", "simulate")],
            }
        ],
        "executors": ["airflow_provider_penstock.executors.penstock.PenstockExecutor"],
        "notifications": ["airflow_provider_penstock.notifications.penstock.PenstockCancelNotifier"],
        "cli": ["airflow_provider_penstock.cli.definition.get_penstock_cli_commands"],
        "config": {
            "penstock_executor": {"description": "Settings of PenstockExecutor.", "options": EXECUTOR_OPTIONS},
        },
        "sensors": modules("sensors"),
        "hooks": modules("hooks"),
        "triggers": modules("triggers"),
        "task-decorators": [
            {"name": "penstock", "class-name": "airflow_provider_penstock.decorators.penstock.penstock_task"}
        ],
        "connection-types": [
            {
                "connection-type": "penstock",
                "hook-class-name": "airflow_provider_penstock.hooks.penstock.PenstockHook",
                "hook-name": "Penstock",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "login", "extra"],
                    "relabeling": {"password": "Token"},
                    "placeholders": {"host": "penstock.example.org", "port": "7373"},
                },
                "conn-fields": {
                    "tls": {"label": "TLS", "schema": {"type": ["boolean", "null"], "default": True}},
                    "ca_file": {
                        "label": "Certificates to trust",
                        "description": "A PEM file on workers and triggerers. Empty: the system's certificates.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "deployment": {
                        "label": "Name of this Airflow",
                        "description": "A name that no other Airflow uses with this penstockd, such as airflow-production.",
                        "schema": {"type": "string", "minLength": 1},
                    },
                    "public_url": {
                        "label": "Address for browsers",
                        "description": "For links to jobs, such as https://penstock.example.org. Empty: host and port.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "timeout_s": {"label": "Timeout, s", "schema": {"type": ["number", "null"], "default": 30}},
                },
            }
        ],
        "extra-links": [
            "airflow_provider_penstock.links.penstock.PenstockJobLink",
            "airflow_provider_penstock.links.penstock.PenstockExplainLink",
        ],
    }
