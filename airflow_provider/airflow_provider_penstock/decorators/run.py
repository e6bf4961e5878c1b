"""Runs in the job, from the shared folder: calls the function and writes its result or exception beside this file."""

import json
import os
import platform
import stat
import sys
import traceback
from pathlib import Path
from typing import Any


def write(path: Path, data: bytes) -> None:
    """Write a file at once, so that no reader sees a part of it. Only those who may use its folder may read it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    mode = 0o660 if path.parent.stat().st_mode & stat.S_ISGID else 0o600
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def check(folder: Path) -> Any:
    """Return cloudpickle. Ends the job if this Python or cloudpickle could not read the function."""
    made_by = json.loads((folder / "made_by.json").read_text())
    here = platform.python_version()
    if here.split(".")[:2] != made_by["python"].split(".")[:2]:
        sys.exit(
            f"this is Python {here} ({sys.executable}), but the function comes from Python {made_by['python']}: name an "
            "interpreter of that version with python=..."
        )
    try:
        import cloudpickle
    except ImportError:
        sys.exit(
            f"{sys.executable} has no cloudpickle: install it there (pip install cloudpickle=={made_by['cloudpickle']})"
        )
    if cloudpickle.__version__.split(".")[0] != made_by["cloudpickle"].split(".")[0]:
        sys.exit(
            f"{sys.executable} has cloudpickle {cloudpickle.__version__}, but the function comes from {made_by['cloudpickle']}: "
            "install that version"
        )
    return cloudpickle


def refuse_variables() -> None:
    """Let `Variable.get` raise: a job cannot ask Airflow, so it would return the default without a word.

    Variables in the job's environment (AIRFLOW_VAR_...) are found as ever.
    """
    try:
        from airflow.sdk import Variable
    except ImportError:  # this interpreter has no Airflow, or Airflow 2
        return
    get = Variable.get

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if f"AIRFLOW_VAR_{name.upper()}" in os.environ:
            return get(name, *args, **kwargs)
        raise LookupError(
            f"Variable.get({name!r}): a job cannot ask Airflow; pass the value to the function as an argument, such as "
            f"'{{{{ var.value.{name} }}}}'"
        )

    Variable.get = staticmethod(guarded)  # type: ignore[method-assign,assignment]


def main(folder: Path) -> None:
    """Call the function and write its result. Of several processes, only the first writes."""
    cloudpickle = check(folder)
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    job = os.environ["SLURM_JOB_ID"]
    try:
        call = (folder / "call.pkl").read_bytes()
        if b"airflow" in call:
            refuse_variables()
        function, args, kwargs = cloudpickle.loads(call)
        result = cloudpickle.dumps(function(*args, **kwargs))
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = None
        if first:
            write(folder / f"{job}.exception", cloudpickle.dumps((text, pickled)))
        sys.stderr.write(text)
        sys.exit(1)
    if first:
        write(folder / f"{job}.result", result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
