"""Operators that submit jobs, wait for them and cancel them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    BaseOperator,
)

from airflow_provider_penstock.exceptions import PenstockAway, PenstockRefused, PenstockTimeout, failure
from airflow_provider_penstock.hooks.penstock import Job, PenstockHook, summary
from airflow_provider_penstock.lineage import facets, parent_environment
from airflow_provider_penstock.links.penstock import JOB_LINKS, push_links
from airflow_provider_penstock.news import News, ending
from airflow_provider_penstock.operators.arguments import (
    FILES,
    check_all,
    check_intervals,
    check_lease,
    check_program,
    exit_codes,
    is_template,
)
from airflow_provider_penstock.operators.job_spec import JOB_SPEC_FIELDS, JobSpecOperator
from airflow_provider_penstock.ownership import Ownership, ownership
from airflow_provider_penstock.silence import Silence
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger

LOG_LINES = 10_000
"""Most lines of the job's output that its end adds to the task's log."""
LAST_LINES = 20
"""Lines of the job's output in the message of a failed task."""
OPTIONS = ("partition", "account", "qos", "time_limit_s", "working_directory", "dependency", "container_image")
"""Parameters that are fields of a submission. `deadline` and `output_file` are others, with names or values of their own."""
JOB_ID = "job_id"
"""XCom key of the job's id."""
JOB_KEY = "job_key"
"""XCom key of the job's key, see `PenstockHook.own`."""
WAITED_TOO_LONG = ("Trigger timeout", "Trigger/execution timeout")
"""What Airflow 3 and 2 call the end of a deferral's time. Airflow 2 has no exception of its own for it."""
MAX_RESULT_BYTES = 1 << 20
"""Airflow keeps what a task returns in its database."""


class _JobOperator(BaseOperator):
    """The base of operators that wait for one job."""

    operator_extra_links: tuple[Any, ...] = JOB_LINKS
    penstock_conn_id: str
    deferrable: bool
    poll_interval_s: float
    log_interval_s: float
    job_id: str | None
    cancel_on_kill: bool
    lease: timedelta | None = None
    """How long the job runs on although nothing waits for it any more; None: until its end."""

    job_key: str | None = None
    """The key of the task's own job, which tells it from another job that has its id now. A job of others has none here."""
    wait_for_completion: bool = True
    end_from_trigger: bool = False
    skip_on_exit_code: Collection[int] = ()
    result_file: str | None = None

    @property
    def hook(self) -> PenstockHook:
        """A hook for the task's connection."""
        return PenstockHook(self.penstock_conn_id)

    def patient(self, job_id: str) -> PenstockHook:
        """A hook that waits for Penstock's answers for as long as it takes. The task's log tells of it."""
        return PenstockHook(
            self.penstock_conn_id, silence=Silence(self.log, f"the task keeps waiting for job {job_id}")
        )

    def _await(self, context: Any, job_id: str) -> dict[str, Any]:
        """Wait for the job and return its summary. Defers if the task is deferrable and the job has not ended.

        The wait has an end only if the job has one, or Penstock refuses to tell of it.
        """
        try:
            return self._wait(context, job_id)
        except PenstockRefused as refused:
            raise self._leaves(context, job_id, refused) from refused

    def _wait(self, context: Any, job_id: str) -> dict[str, Any]:
        if self.deferrable and not self._has_ended(job_id):
            self.defer(
                trigger=PenstockJobTrigger(
                    self.penstock_conn_id,
                    job_id,
                    self.poll_interval_s,
                    self.cancel_on_kill,
                    self.log_interval_s,
                    self._leased,
                    self.end_from_trigger,
                    self.job_key,
                ),
                method_name="execute_complete",
                kwargs=self._kept(job_id),
                timeout=self._left(context),
            )
        hook, news, shown = self.patient(job_id), News(), 0
        for job in hook.wait(job_id):
            if self.job_key not in (None, job["key"]):
                break
            if self._leased:
                hook.renew(job_id)
            self.show_output(news.of(job))
            if self.log_interval_s and job["state"] in ("running", "stopping"):
                lines, shown = hook.log_since(job_id, shown, whole=True)
                self.show_output(lines)
        return self._finish(context, job_id, shown)

    def _has_ended(self, job_id: str) -> bool:
        try:
            return bool(self.hook.job(job_id)["state"] == "ended")
        except PenstockAway:  # the triggerer waits until it answers
            return False

    def _kept(self, job_id: str) -> dict[str, Any]:
        """Arguments for `execute_complete` besides the trigger's event, which belong to the job's submission."""
        return {}

    def _leaves(self, context: Any, job_id: str, error: Exception) -> Exception:
        """The failure of a task whose job may still run: it says until when. The job is cancelled if no try takes it up."""
        if getattr(error, "code", "") == "no-such-job":
            return error
        ti = context["ti"]
        is_last = isinstance(error, AirflowFailException) or ti.try_number > ti.max_tries
        if not self.cancel_on_kill:
            fate = "it runs on, because of cancel_on_kill=False"
        elif not is_last:
            fate = f"the task's next try takes it up; if there is none, {self._last_resort}"
        else:
            fate = self._cancel(job_id)
        text = f"{error}. Job {job_id} may not have ended: {fate}"
        return PenstockRefused(text, error.code) if isinstance(error, PenstockRefused) else AirflowException(text)

    @property
    def _last_resort(self) -> str:
        """How a job ends that its task cannot cancel, and when."""
        if self.lease is None or not self._leased:
            return "it runs to its own end, unless somebody cancels it"
        until = datetime.now(UTC) + self.lease
        return (
            "Airflow cancels it within some minutes of Penstock's answer, and Penstock itself cancels it by its lease about "
            f"{until:%Y-%m-%d %H:%M} UTC"
        )

    def _cancel(self, job_id: str) -> str:
        """Cancel the job if it is possible now. Returns what happens to it."""
        try:
            self.hook.cancel_at_once(job_id, self.job_key)
        except Exception as error:  # of any kind: the failure of the task must still say what becomes of its job
            return f"it could not be cancelled now ({error}); {self._last_resort}"
        return "it is cancelled"

    @property
    def _leased(self) -> bool:
        return self.lease is not None and self.cancel_on_kill and self.wait_for_completion

    def _left(self, context: Any) -> timedelta | None:
        """What is left of the try's `execution_timeout`, which Airflow itself applies only while the task is on a worker."""
        if self.execution_timeout is None:
            return None
        spent: timedelta = datetime.now(UTC) - context["ti"].start_date
        return max(self.execution_timeout - spent, timedelta(0))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Go on after the trigger. Cancels the job if the trigger has waited for as long as `execution_timeout` allows."""
        if next_method != "__fail__":
            return super().resume_execution(next_method, next_kwargs, context)
        ti = context["ti"]
        if self.job_id is None:
            names = {"task_ids": ti.task_id, "map_indexes": ti.map_index}
            self.job_id, self.job_key = ti.xcom_pull(key=JOB_ID, **names), ti.xcom_pull(key=JOB_KEY, **names)
        if (next_kwargs or {}).get("error") not in WAITED_TOO_LONG:
            try:
                return super().resume_execution(next_method, next_kwargs, context)
            except Exception as error:  # such as that of a trigger that this release of the provider does not have
                raise self._leaves(context, str(self.job_id), error) from error
        job_id = str(self.job_id)
        end = self._cancel(job_id) if self.cancel_on_kill else "it runs on, because of cancel_on_kill=False"
        raise PenstockTimeout(f"job {job_id} has not ended within execution_timeout={self.execution_timeout}: {end}")

    def execute_complete(self, context: Any, event: dict[str, Any], **kept: Any) -> dict[str, Any]:
        """Return the job's summary after the trigger, or fail. `kept` is what `_kept` returned."""
        job_id = self.job_id = str(event["job_id"])
        self.job_key = event.get("key")
        if "error" in event:
            error = AirflowException(f"waiting for job {job_id} failed: {event['error']}")
            raise error if event.get("code") == "no-such-job" else self._leaves(context, job_id, error)
        try:
            return self._with_assets(context, self._finish(context, job_id, event.get("shown", 0)))
        except PenstockRefused as refused:
            raise self._leaves(context, job_id, refused) from refused

    def _with_assets(self, context: Any, job: dict[str, Any]) -> dict[str, Any]:
        """The job's summary, after adding it as `job` to the events of the task's assets."""
        for outlet in self.outlets:
            with contextlib.suppress(TypeError):  # an outlet only for lineage has no events
                context["outlet_events"][outlet].extra["job"] = job
        return job

    def _finish(self, context: Any, job_id: str, shown: int) -> dict[str, Any]:
        """Log the rest of an ended job's output, from byte `shown` on, and return its summary. Raises if the job failed."""
        hook = self.patient(job_id)
        job = hook.own(job_id, self.job_key)
        if job["state"] != "ended":  # a slurmctld that was killed had forgotten its end, and runs it again
            return self._await(context, job_id)
        job_id = str(job["id"])
        self.show_output(hook.log_since(job_id, shown)[0][-LOG_LINES:])
        if job["ended"] == "FAILED" and job["exit_code"] in self.skip_on_exit_code:
            raise AirflowSkipException(ending(job))
        if job["ended"] != "COMPLETED":
            last = "\n".join(hook.log_lines(job_id)[-LAST_LINES:])
            raise failure(job["ended"])(f"{ending(job)}\n{last}")
        self.log.info("%s", ending(job))
        found = summary(job, hook.used(job_id))
        return found if self.result_file is None else found | {"result_file": _read_result(self.result_file, job_id)}

    def show_output(self, lines: Sequence[str]) -> None:
        """Log lines of the job's output."""
        for line in lines:
            self.log.info("%s", line)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """The job's id for OpenLineage; None without OpenLineage."""
        return facets(self.hook.base_url, self.job_id)

    def on_kill(self) -> None:
        """Cancel the job, because the task was stopped while it ran on a worker."""
        if self.job_id and self.cancel_on_kill:
            self.log.info("job %s of the stopped task: %s", self.job_id, self._cancel(self.job_id))


class _NoFile(str):
    """Text that Airflow renders as a template, and does not read as a template file even if it ends in `.sh`.

    Only while it is rendered: Airflow cannot send subclasses of `str` between its processes.
    """

    __slots__ = ()

    def endswith(self, *_: object) -> bool:
        return False


class PenstockSubmitOperator(JobSpecOperator, _JobOperator):
    """Submits a job and waits until it has ended. Returns the job's `summary`.

    penstockd keeps one job for a task of a DAG run. A retry waits for the job if it has not ended, takes its result if it
    completed, and submits a new one if it failed. A cleared task, and a task of a DAG run that was deleted and triggered again,
    gets a new job, which starts once the former has ended.

    .. seealso::
        For more information on how to use this operator, take a look at the guide: :ref:`howto/operator:PenstockSubmitOperator`
    """

    template_fields: Sequence[str] = (
        "penstock_conn_id",
        "name",
        "script",
        "command",
        *JOB_SPEC_FIELDS,
        *OPTIONS,
        "deadline",
        "output_file",
        "result_file",
        "spec",
        "options",
        "environment",
    )
    template_ext: Sequence[str] = FILES
    needs_program = True
    """Whether a script or a command must be given."""
    template_fields_renderers = {"script": "bash", "spec": "json", "options": "json", "environment": "json"}  # noqa: RUF012

    def __init__(
        self,
        *,
        script: str | None = None,
        command: Sequence[str] | None = None,
        name: str | None = None,
        spec: dict[str, Any] | str | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        time_limit_s: float | str | None = None,
        working_directory: str | None = None,
        output_file: str | None = None,
        result_file: str | None = None,
        dependency: str | None = None,
        container_image: str | None = None,
        deadline: datetime | str | None = None,
        options: dict[str, Any] | str | None = None,
        environment: dict[str, str] | str | None = None,
        check_first: bool = True,
        durable: bool = True,
        wait_for_completion: bool = True,
        deferrable: bool = True,
        cancel_on_kill: bool = True,
        lease: timedelta | None = timedelta(days=3),
        end_from_trigger: bool = False,
        skip_on_exit_code: int | Collection[int] | None = None,
        poll_interval_s: float = 2.0,
        log_interval_s: float = 30.0,
        penstock_conn_id: str = PenstockHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        """Every field of the job spec is a parameter too; see `JobSpecOperator`.

        For templates, numbers may be strings, `deadline` may be ISO 8601, and dictionaries may be JSON.

        Args:
            script: The text of a batch script, or the name of a file `*.sh` or `*.sbatch` beside the DAG.
            command: A program and its arguments, instead of `script`.
            name: Name of the job in Slurm; by default `DAG.TASK`.
            spec: Fields of the job spec as a dictionary, such as one that a template makes. Parameters win.
            partition, account, qos, time_limit_s, working_directory, output_file, dependency: As in sbatch.
            result_file: A JSON file that the job writes and that this worker can read; `%j` is the job's id. The task's
                result has its content as `result_file`.
            container_image: As sbatch's `--container-image`, which needs pyxis.
            deadline: When Slurm ends the job, whether it runs or still waits. It needs a time zone.
            options: Further fields of a submission, see docs/user/api.md.
            environment: Environment variables that are added to the job's.
            check_first: Whether to fail at once if the job could never run.
            durable: Whether a retry takes up the job of an earlier try. If False, each try submits a new job.
            wait_for_completion: If False, the task ends once the job is submitted.
            deferrable: Whether the task waits in the triggerer, where it takes no worker slot.
            cancel_on_kill: Whether to cancel the job when the task is stopped.
            lease: With `cancel_on_kill`, penstockd cancels the job once nothing in Airflow has waited for it for this long, for
                example because no scheduler of Airflow runs that could cancel it. At least 10 minutes; None: never.
            end_from_trigger: Whether a task that waits in the triggerer succeeds there once its job has completed, without
                another worker slot. Not for tasks with outlets, whose events Airflow only creates on a worker.
            skip_on_exit_code: Exit codes of the job with which the task is skipped, and does not fail.
            poll_interval_s: Seconds between two requests for the job's state.
            log_interval_s: Seconds between two copies of a running job's output into the task's log; 0 copies it at the end.
            penstock_conn_id: The connection to penstockd.
        """
        if "array" in kwargs:
            raise ValueError(
                "array: a task is one job; map it, as in partial(...).expand(environment=[{'INDEX': '1'}, {'INDEX': '2'}]), "
                "so that each element is retried alone"
            )
        if result_file is not None and (end_from_trigger or not wait_for_completion):
            raise ValueError(
                "result_file is read on a worker after the job: leave end_from_trigger and wait_for_completion=False out"
            )
        texts = (("spec", spec), ("options", options), ("environment", environment))
        check_all(
            partial(check_program, script, command, is_needed=self.needs_program),
            partial(check_lease, lease),
            partial(check_intervals, poll_interval_s, log_interval_s),
            partial(exit_codes, skip_on_exit_code),
            *(partial(_fields, name, value) for name, value in texts if not is_template(value)),
            partial(_seconds, None if is_template(deadline) or not isinstance(deadline, str | datetime) else deadline),
        )
        super().__init__(**kwargs)
        if end_from_trigger and self.outlets:
            raise ValueError(
                "end_from_trigger: Airflow would create no events for the task's outlets; leave one of them out"
            )
        self.end_from_trigger = end_from_trigger
        self.skip_on_exit_code = exit_codes(skip_on_exit_code)
        self.lease = lease
        self.script = script
        self.command = command
        self.name = name
        self.partition = partition
        self.account = account
        self.qos = qos
        self.time_limit_s = time_limit_s
        self.working_directory = working_directory
        self.output_file = output_file
        self.result_file = result_file
        self.dependency = dependency
        self.container_image = container_image
        self.deadline = deadline
        self.log_interval_s = log_interval_s
        self.spec = spec
        self.options = options
        self.environment = environment
        self.check_first = check_first
        self.durable = durable
        self.wait_for_completion = wait_for_completion
        self.deferrable = deferrable
        self.cancel_on_kill = cancel_on_kill
        self.poll_interval_s = poll_interval_s
        self.penstock_conn_id = penstock_conn_id
        self.job_id: str | None = None

    def resolve_template_files(self) -> None:
        """Read the file that `script` names. Arguments of `command` that end in `.sh` are files of the job."""
        command = self.command
        if _is_list(command):
            self.command = None
        super().resolve_template_files()
        self.command = command

    def render_template(self, content: Any, *arguments: Any, **named: Any) -> Any:
        """Render a template. Only `script` may name a template file."""
        if isinstance(content, str) and content is not self.script:
            content = _NoFile(content)
        return super().render_template(content, *arguments, **named)

    def execute(self, context: Any) -> dict[str, Any]:
        """Submit the job, or find that of an earlier try, and wait for it."""
        ti = context["ti"]
        job = self._submit(context)
        self.job_id, self.job_key = job["id"], job["key"]
        ti.xcom_push(key=JOB_ID, value=self.job_id)
        ti.xcom_push(key=JOB_KEY, value=self.job_key)
        push_links(ti, self.hook, job["id"])
        self._submitted(context, job["id"])
        return self._with_assets(context, self._await(context, job["id"]) if self.wait_for_completion else summary(job))

    def _submitted(self, context: Any, job_id: str) -> None:
        """Keep what belongs to the submission, before the wait begins."""

    def submission(self, ti: Any) -> dict[str, Any]:
        """The body for the API without its key. It is the same on each try, because a key belongs to one body."""
        environment = {
            "AIRFLOW_CTX_DAG_ID": ti.dag_id,
            "AIRFLOW_CTX_DAG_RUN_ID": ti.run_id,
            "AIRFLOW_CTX_TASK_ID": ti.task_id,
            "AIRFLOW_CTX_MAP_INDEX": str(ti.map_index),
        }
        own = {name: str(value) for name, value in _fields("environment", self.environment).items()}
        body = {
            "name": self.name or f"{ti.dag_id}.{ti.task_id}",
            "script": self.script,
            "command": self.command,
            "spec": _fields("spec", self.spec) | self._given(JOB_SPEC_FIELDS),
            "environment": environment | parent_environment(ti) | own,
            "output": self.output_file,
            "deadline_s": _seconds(self.deadline),
        }
        given = {name: value for name, value in body.items() if value is not None}
        return _fields("options", self.options) | given | self._given(OPTIONS)

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _submit(self, context: Any) -> Job:
        body = self.submission(context["ti"])
        owner = ownership(context, self.hook.deployment)
        if not self.durable:
            owner = replace(owner, generation=f"{owner.generation}:{owner.attempt}")
        if self.lease is not None and self._leased:
            owner = replace(owner, lease_s=self.lease.total_seconds())
        self._check(owner, body)
        job = self._once(body | {"key": owner.key, "owner": owner.body})
        self.log.info("job %s is %s, key %s", job["id"], job["ended"] or job["state"], job["key"])
        return job

    def _once(self, submission: dict[str, Any]) -> Job:
        try:
            return self.hook.submit(submission)
        except PenstockRefused as refused:
            # This try's worker was killed during its request, and the task was edited since: the job is the try's.
            if refused.code != "key-used" or (found := self.hook.find(submission["key"])) is None:
                raise
            return found
        except PenstockAway as away:
            raise PenstockAway(
                f"{away}. If it has taken the job with the key {submission['key']}, the task's next try takes it up; if there is "
                f"none, {self._last_resort}"
            ) from None

    def _check(self, owner: Ownership, body: dict[str, Any]) -> None:
        """Raise PenstockRefused if the job could never run. Jobs may wait for GPUs that are down or drained, or for the cloud."""
        if not self.check_first or body["spec"].get("burst") in ("allowed", "only"):
            return
        try:
            known = self.hook.owner(owner.name)
            if known is not None and known["generation"] == owner.generation:
                return  # an earlier try has submitted it
            forecast = self.hook.forecast(body)
            if forecast["would"] == "never" and self.hook.is_whole():
                raise PenstockRefused(forecast["text"], forecast["code"])
        except PenstockAway as away:
            self.log.info("it is unknown whether the job could ever run: %s", away)


class PenstockWaitOperator(_JobOperator):
    """Waits for a job that was submitted elsewhere. Returns its `summary`; fails if it did not complete.

    .. seealso::
        For more information on how to use this operator, take a look at the guide: :ref:`howto/operator:PenstockWaitOperator`
    """

    template_fields: Sequence[str] = ("penstock_conn_id", "job_id")

    def __init__(
        self,
        *,
        job_id: str,
        deferrable: bool = True,
        cancel_on_kill: bool = False,
        poll_interval_s: float = 2.0,
        log_interval_s: float = 30.0,
        penstock_conn_id: str = PenstockHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.log_interval_s = log_interval_s
        self.job_id: str | None = job_id
        self.deferrable = deferrable
        self.cancel_on_kill = cancel_on_kill
        self.poll_interval_s = poll_interval_s
        self.penstock_conn_id = penstock_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Wait for the job."""
        push_links(context["ti"], self.hook, str(self.job_id))
        return self._with_assets(context, self._await(context, str(self.job_id)))


class PenstockCancelOperator(BaseOperator):
    """Cancels a job. A job that has ended stays as it is.

    .. seealso::
        For more information on how to use this operator, take a look at the guide: :ref:`howto/operator:PenstockCancelOperator`
    """

    operator_extra_links: tuple[Any, ...] = JOB_LINKS
    template_fields: Sequence[str] = ("penstock_conn_id", "job_id")

    def __init__(self, *, job_id: str, penstock_conn_id: str = PenstockHook.default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.penstock_conn_id = penstock_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Cancel the job and return its summary."""
        hook = PenstockHook(self.penstock_conn_id)
        push_links(context["ti"], hook, self.job_id)
        return summary(hook.cancel(self.job_id))


def _read_result(file: str, job_id: str) -> Any:
    """The content of a job's result file. Raises AirflowException if there is no JSON; a retry reads the same job's file."""
    path = Path(file.replace("%j", job_id))
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise AirflowException(
                f"result_file {path} has more than {MAX_RESULT_BYTES} bytes; write the large part into a file of its own, and "
                "its path into this one"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AirflowException(
            f"job {job_id} has completed, but its result_file cannot be read on this worker: {error}; name a file in a folder "
            "that nodes and workers share"
        ) from None
    except ValueError as error:
        raise AirflowException(f"result_file {path} of job {job_id} is not JSON: {error}") from None


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, list | tuple)


def _fields(name: str, given: dict[str, Any] | str | None) -> dict[str, Any]:
    """A dictionary, or its JSON from a template. Raises PenstockRefused for other text."""
    if not isinstance(given, str):
        return given or {}
    try:
        found = json.loads(given)
    except ValueError as error:
        raise PenstockRefused(f"{name}={given!r} is not JSON: {error}; in a template, use tojson") from None
    if not isinstance(found, dict):
        raise PenstockRefused(f"{name}={given!r} is not a JSON object")
    return found


def _seconds(moment: datetime | str | None) -> float | None:
    """Seconds since the epoch, from a time or its ISO 8601 text. Raises PenstockRefused for other text."""
    try:
        found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    except ValueError:
        raise PenstockRefused(f"deadline={moment!r} is not a time; write it as 2026-11-21T18:00:00+00:00") from None
    if found is not None and found.tzinfo is None:
        raise PenstockRefused(f"deadline={moment!r} has no time zone; add one, such as +00:00")
    return None if found is None else found.timestamp()
