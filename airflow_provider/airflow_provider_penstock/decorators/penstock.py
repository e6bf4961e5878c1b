"""`@task.penstock`: a Python function that runs in a Slurm job; its result, or its exception, is the task's.

The function and its arguments travel as files (cloudpickle) in a folder that workers and nodes share, and so does its result.
Whoever may write to that folder can run code as the job's user and as the worker's: it is for those two alone.
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
from importlib import resources
from pathlib import Path
from typing import Any

import cloudpickle
from airflow.providers.common.compat.sdk import (
    AirflowFailException,
    DecoratedOperator,
    context_merge,
    determine_kwargs,
    task_decorator_factory,
)

from airflow_provider_penstock.decorators.run import leave
from airflow_provider_penstock.exceptions import PenstockFunctionFailed, PenstockJobFailed
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator, job_key


class _PenstockDecoratedOperator(DecoratedOperator, PenstockSubmitOperator):  # type: ignore[misc]
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in PenstockSubmitOperator.template_fields if name not in ("script", "command")),
        "shared_folder",
        "python",
    )
    custom_operator_name = "@task.penstock"

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
        """`shared_folder` is seen by workers and nodes under the same path. `python` is the interpreter in the job: of this one's
        version, with cloudpickle. `launcher`, such as `["srun"]`, starts it once for each task; the first one's result counts.
        """
        if "script" in kwargs or "command" in kwargs:
            raise ValueError("@task.penstock runs the function: it takes neither script nor command")
        self.shared_folder = shared_folder
        self.python = python
        self.launcher = launcher
        super().__init__(python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, **kwargs)

    def execute(self, context: Any) -> Any:
        """Leave the call in the shared folder, submit, wait, and return what the function returned."""
        context_merge(context, self.op_kwargs)
        kwargs = determine_kwargs(self.python_callable, self.op_args, context)
        folder = self._folder(context)
        self._leave_call(folder, kwargs)
        words = (*self.launcher, self.python, f"{folder}/run.py", str(folder))
        self.script = f"#!/bin/sh\nexec {shlex.join(words)}\n"
        return self._outcome(context, lambda: PenstockSubmitOperator.execute(self, context))

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """After the trigger: what the function returned, or its exception."""
        return self._outcome(context, lambda: PenstockSubmitOperator.execute_complete(self, context, event))

    def _outcome(self, context: Any, run_job: Callable[[], dict[str, Any]]) -> Any:
        folder = self._folder(context)
        try:
            job = run_job()
        except PenstockJobFailed as failed:
            self._raise(folder, failed)
            raise
        return self._output(context, self._result(folder)) if job["state"] == "COMPLETED" else job

    def _output(self, context: Any, value: Any) -> Any:
        if "context" in inspect.signature(self._handle_output).parameters:  # before Airflow 3
            return self._handle_output(value, context, self.xcom_push)
        return self._handle_output(value)

    def _folder(self, context: Any) -> Path:
        name = hashlib.sha256(job_key(context["ti"]).encode()).hexdigest()[:32]
        return Path(self.shared_folder) / name

    def _leave_call(self, folder: Path, kwargs: Mapping[str, Any]) -> None:
        module = sys.modules.get(self.python_callable.__module__)
        by_value = module is not None and module.__name__ != "__main__"
        if by_value:  # the DAG's file is not on the nodes
            cloudpickle.register_pickle_by_value(module)
        try:
            args = tuple(_here(value) for value in self.op_args)
            call = cloudpickle.dumps(
                (self.python_callable, args, {name: _here(value) for name, value in kwargs.items()})
            )
        except (pickle.PicklingError, TypeError) as error:
            raise AirflowFailException(
                f"{self.python_callable.__name__} and its arguments cannot be sent to the job: {error}; pass paths or values"
            ) from error
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        made_by = {"python": platform.python_version(), "cloudpickle": cloudpickle.__version__}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            leave(folder / "call.pkl", call)
            leave(folder / "made_by.json", json.dumps(made_by).encode())
            leave(folder / "run.py", resources.files(__package__).joinpath("run.py").read_bytes())
        except OSError as error:
            raise AirflowFailException(
                f"shared_folder {self.shared_folder} cannot be written: {error}; name a folder that this worker may write to"
            ) from error

    def _result(self, folder: Path) -> Any:
        try:
            return pickle.loads((folder / f"{self.job_id}.result").read_bytes())  # noqa: S301 # see the module's word on who may write there
        except FileNotFoundError:
            raise PenstockJobFailed(
                f"job {self.job_id} has completed without leaving a result in {folder}; is shared_folder the same on its nodes?"
            ) from None

    def _raise(self, folder: Path, failed: PenstockJobFailed) -> None:
        """Raise the function's own exception, if it was that which ended the job."""
        try:
            text, pickled = pickle.loads((folder / f"{self.job_id}.exception").read_bytes())  # noqa: S301
        except FileNotFoundError:
            return
        cause = None
        if pickled is not None:
            try:
                cause = pickle.loads(pickled)  # noqa: S301
            except Exception as error:
                self.log.warning("the exception's class cannot be loaded here (%s); its traceback follows", error)
        raise PenstockFunctionFailed(f"{failed}\n{text}") from cause


def _here(value: Any) -> Any:
    """The value itself. What the tasks of a mapped one returned is a sequence that asks Airflow for each when it is looked at."""
    lazy = isinstance(value, Sequence) and type(value).__module__.startswith("airflow.")
    return list(value) if lazy else value


def penstock_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> Any:
    """Make a function a task that runs in a Slurm job: `@task.penstock(shared_folder="/shared/airflow", max_gpus=4)`."""
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=_PenstockDecoratedOperator,
        **kwargs,
    )
