"""Operators that answer "what if": a forecast for one job by penstockd, and a simulation of many on the worker."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator

from airflow_provider_penstock.operators.penstock import LAST_LINES, PenstockSubmitOperator

try:
    from airflow.sdk.log import mask_secret
except ImportError:  # before Airflow 3
    from airflow.utils.log.secrets_masker import mask_secret  # type: ignore[no-redef]

_PASSWORD = re.compile(r"(?<=://)(?P<user>[^:/@]*:)(?P<password>[^@]*)(?=@)")
"""User and password in a database URL of SQLAlchemy."""


class PenstockForecastOperator(PenstockSubmitOperator):
    """Returns what a job would get if it were submitted now, a `Forecast` of the API. Submits nothing.

    Takes the arguments of PenstockSubmitOperator that describe the job. Fails at once if the job could never run.

    .. seealso::
        For more information on how to use this operator, take a look at the guide: :ref:`howto/operator:PenstockForecastOperator`
    """

    operator_extra_links = ()
    needs_program = False

    def execute(self, context: Any) -> dict[str, Any]:
        """Ask penstockd."""
        forecast = self.hook.forecast(self.submission(context["ti"]))
        for line in forecast["lines"]:
            self.log.info("%s", line)
        if forecast["would"] == "never":
            raise AirflowFailException(f"the job could never run here: {forecast['text']}")
        return forecast


class PenstockSimulateOperator(BaseOperator):
    """Runs `penstock simulate run` on the worker, or with `store` `penstock simulate whatif`, and returns its summary.

    A simulation computes for minutes, so it runs on the worker and not in penstockd. Penstock must be installed on the worker.

    .. seealso::
        For more information on how to use this operator, take a look at the guide: :ref:`howto/operator:PenstockSimulateOperator`
    """

    template_fields: Sequence[str] = ("cluster", "workload", "store", "policies", "out", "options", "program")
    template_fields_renderers = {"options": "json"}  # noqa: RUF012

    def __init__(
        self,
        *,
        cluster: str | None = None,
        workload: str | None = None,
        store: str | None = None,
        policies: Sequence[str] | str = "sia",
        seeds: int = 1,
        out: str | None = None,
        options: Mapping[str, Any] | None = None,
        program: str = "penstock",
        **kwargs: Any,
    ) -> None:
        """Give either `cluster` and `workload`, or `store`.

        Args:
            cluster: The nodes, such as `t4:6x4,a100:2x8`.
            workload: A file of jobs.
            store: The daemon's store, as a URL or folder. Its recorded history is replayed.
            policies: The policies to compare.
            seeds: Runs of each policy, with different random seeds.
            out: A folder for the report.
            options: Further options of the command, such as `{"add-nodes": "a100:2x8", "parquet": True}`.
            program: The command `penstock` on the worker.
        """
        super().__init__(**kwargs)
        self.cluster = cluster
        self.workload = workload
        self.store = store
        self.policies = policies
        self.seeds = seeds
        self.out = out
        self.options = options
        self.program = program
        self._running: subprocess.Popen[str] | None = None

    @property
    def store(self) -> str | None:
        """The daemon's store."""
        return self._store

    @store.setter
    def store(self, store: str | None) -> None:
        """Set the store, and hide its password in Airflow's logs and pages. Airflow also sets it when it renders templates."""
        self._store = store
        if store is not None and (found := _PASSWORD.search(store)):
            for secret in {found["password"], unquote(found["password"])}:
                mask_secret(secret)

    def words(self) -> list[str]:
        """The command line without the store. The store's URL may have a password, and every user of the worker can read
        command lines."""
        whatif = self.store is not None
        if whatif == (self.cluster is not None or self.workload is not None):
            raise AirflowFailException(
                "give either cluster and workload, to simulate, or store, to replay its recorded history"
            )
        policies = self.policies if isinstance(self.policies, str) else ",".join(self.policies)
        own = {"cluster": self.cluster, "workload": self.workload, "policy": policies}
        given = own | {"seeds": self.seeds, "out": self.out} | dict(self.options or {})
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items() if value]
        return [self.program, "simulate", "whatif" if whatif else "run", *words, "--json"]

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the command."""
        words = self.words()
        self.log.info("%s", " ".join(words))
        environment = dict(os.environ)
        if self.store is not None:
            self.log.info("store %s", _PASSWORD.sub(r"\g<user>***", self.store))
            environment["PENSTOCK_STORE"] = self.store
        pipe = subprocess.PIPE
        try:
            self._running = subprocess.Popen(
                words, env=environment, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            raise AirflowFailException(
                f"{self.program} cannot be started: {error}; install Penstock on the worker, or name its program"
            ) from error
        output, errors = self._running.communicate()
        if self._running.returncode != 0:
            last = "\n".join(errors.splitlines()[-LAST_LINES:])
            raise AirflowFailException(f"{words[1]} has ended with status {self._running.returncode}\n{last}")
        return dict(json.loads(output))

    def on_kill(self) -> None:
        """End the command."""
        if self._running is not None and self._running.poll() is None:
            self._running.terminate()
