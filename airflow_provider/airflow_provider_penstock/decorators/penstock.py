"""`@task.penstock`: runs a Python function in a Slurm job. Its result or exception becomes the task's.

The function, its arguments and its result are cloudpickle files in a folder that workers and nodes share. A user who can write to
that folder can run code as the job's user and as the worker's, so `folder` keeps the files to those two.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
from airflow.providers.common.compat.sdk import (
    AirflowFailException,
    AirflowSkipException,
    DecoratedOperator,
    context_merge,
    determine_kwargs,
    task_decorator_factory,
)

from airflow_provider_penstock.decorators.folder import TaskFolder
from airflow_provider_penstock.exceptions import PenstockFunctionFailed, PenstockJobFailed
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
from airflow_provider_penstock.ownership import keep, kept, ownership

SCRIPT = """#!/bin/sh
if [ ! -r {folder}/run.py ]; then
  echo "user $(id -un) cannot read "{folder}" on $(hostname): shared_folder must be the same folder as on the workers." >&2
  echo "If jobs run as another user than workers, give it a group of both users: chgrp GROUP, chmod 2770" >&2
  exit 1
fi
exec {command}
"""


class _PenstockDecoratedOperator(DecoratedOperator, PenstockSubmitOperator):
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in PenstockSubmitOperator.template_fields if name not in ("script", "command")),
        "shared_folder",
        "python",
    )
    custom_operator_name = "@task.penstock"
    needs_program = False

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        shared_folder: str,
        python: str = "python3",
        launcher: Sequence[str] = (),
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """All other arguments are those of `PenstockSubmitOperator`, except `script` and `command`.

        Args:
            python_callable: The function.
            shared_folder: A folder that workers and nodes have under the same path.
            python: The job's interpreter, of the same version as the worker's and with cloudpickle.
            launcher: A command such as `["srun"]` that starts the interpreter once for each task. The first result counts.
            op_args: The function's positional arguments.
            op_kwargs: The function's keyword arguments.
        """
        if "script" in kwargs or "command" in kwargs:
            raise ValueError("@task.penstock runs the function: leave script and command out")
        if kwargs.get("end_from_trigger"):
            raise ValueError("@task.penstock reads the function's result on a worker: leave end_from_trigger out")
        if kwargs.get("result_file"):
            raise ValueError("@task.penstock returns the function's result: leave result_file out")
        self.shared_folder = shared_folder
        self.python = python
        self.launcher = launcher
        super().__init__(python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, **kwargs)

    def execute(self, context: Any) -> Any:
        """Write the call into the shared folder, submit the job, wait, and return the function's result."""
        context_merge(context, self.op_kwargs)
        kwargs = determine_kwargs(self.python_callable, self.op_args, context)
        folder = self._new_folder(context)
        self._folder_of_job = str(folder.path)
        self._write_call(folder, kwargs)
        words = (*self.launcher, self.python, f"{folder.path}/run.py", str(folder.path))
        self.script = SCRIPT.format(folder=shlex.quote(str(folder.path)), command=shlex.join(words))
        return self._outcome(context, lambda: PenstockSubmitOperator.execute(self, context))

    def execute_complete(self, context: Any, event: dict[str, Any], folder: str | None = None, **_: Any) -> Any:
        """Return the function's result after the trigger, or raise its exception.

        `folder` is that of the job. A task that was deferred by an earlier release of this provider has none.
        """
        self._folder_of_job = folder or str(self._new_folder(context).path)
        return self._outcome(context, lambda: PenstockSubmitOperator.execute_complete(self, context, event))

    def _submitted(self, context: Any, job_id: str) -> None:
        """Keep the folder of a new job. A try that takes up an earlier job takes its folder, too."""
        known = kept(context)
        if known.get("job") == self.job_key and known.get("folder"):
            self._folder_of_job = known["folder"]
        else:
            keep(context, job=self.job_key, folder=self._folder_of_job)

    def _kept(self, job_id: str) -> dict[str, Any]:
        return {"folder": self._folder_of_job}

    def _outcome(self, context: Any, run_job: Callable[[], dict[str, Any]]) -> Any:
        try:
            job = run_job()
        except PenstockJobFailed as failed:
            folder = TaskFolder.at(self._folder_of_job)
            try:
                self._raise(folder.path, failed)
            finally:
                folder.take()
            raise
        if job["state"] != "COMPLETED":
            return job
        folder = TaskFolder.at(self._folder_of_job)
        output = self._output(context, self._result(folder.path))
        folder.take()
        return output

    def _output(self, context: Any, value: Any) -> Any:
        of_any_version: Any = self
        if "context" in inspect.signature(self._handle_output).parameters:  # before Airflow 3
            return of_any_version._handle_output(value, context, of_any_version.xcom_push)
        return self._handle_output(value)

    def _new_folder(self, context: Any) -> TaskFolder:
        owner = ownership(context, self.hook.deployment)
        name = hashlib.sha256(f"{owner.name}:{owner.generation}".encode()).hexdigest()[:32]
        return TaskFolder(self.shared_folder, name)

    def _write_call(self, folder: TaskFolder, kwargs: Mapping[str, Any]) -> None:
        module = sys.modules.get(self.python_callable.__module__)
        by_value = module is not None and module.__name__ != "__main__"
        if by_value:  # the nodes do not have the DAG's file
            cloudpickle.register_pickle_by_value(module)
        try:
            args = tuple(_plain(value) for value in self.op_args)
            call = cloudpickle.dumps(
                (self.python_callable, args, {name: _plain(value) for name, value in kwargs.items()})
            )
        except Exception as error:  # the classes of arguments decide which
            unsendable = [name for name, value in kwargs.items() if not _can_be_sent(value)]
            what = f"argument {', '.join(unsendable)} of " if unsendable else "arguments of "
            raise AirflowFailException(
                f"{what}{self.python_callable.__name__} cannot be sent to the job ({type(error).__name__}: {error}); pass paths "
                "or values, such as op_kwargs={'run': '{{ run_id }}'} instead of ti"
            ) from error
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        made_by = {"python": platform.python_version(), "cloudpickle": cloudpickle.__version__}
        try:
            folder.put(call, json.dumps(made_by).encode())
        except OSError as error:
            raise AirflowFailException(
                f"shared_folder {self.shared_folder} cannot be written: {error}; choose a folder that this worker can write to, "
                "and no other user"
            ) from error

    def _result(self, folder: Path) -> Any:
        try:
            return pickle.loads((folder / f"{self.job_id}.result").read_bytes())  # noqa: S301 # written by trusted users, see the module's docstring
        except FileNotFoundError:
            raise PenstockJobFailed(
                f"job {self.job_id} has completed without a result in {folder}; is shared_folder the same folder on its nodes?"
            ) from None

    def _raise(self, folder: Path, failed: PenstockJobFailed) -> None:
        """Raise the function's own exception, if it ended the job."""
        try:
            text, pickled = pickle.loads((folder / f"{self.job_id}.exception").read_bytes())  # noqa: S301
        except FileNotFoundError:
            return
        cause = None
        if pickled is not None:
            try:
                cause = pickle.loads(pickled)  # noqa: S301
            except Exception as error:
                self.log.warning(
                    "the exception's class cannot be loaded on this worker (%s); the traceback follows", error
                )
        if isinstance(cause, (AirflowSkipException, AirflowFailException)):  # the function's word to Airflow
            raise cause from failed
        raise PenstockFunctionFailed(f"{failed}\n{text}") from cause


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _plain(value: Any) -> Any:
    """The value. The results of a mapped task are a lazy sequence that only works inside Airflow, and become a list."""
    lazy = isinstance(value, Sequence) and type(value).__module__.startswith("airflow.")
    return list(value) if lazy else value


def penstock_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> Any:
    """Makes a function a task that runs in a Slurm job: `@task.penstock(shared_folder="/shared/airflow", max_gpus=4)`.

    .. seealso::
        For more information on how to use this decorator, take a look at the guide: :ref:`howto/decorator:penstock`
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=_PenstockDecoratedOperator,
        **kwargs,
    )
