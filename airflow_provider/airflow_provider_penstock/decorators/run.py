"""Runs in the job, from the shared folder: calls the function that lies beside, and leaves what it returned or raised."""

import json
import os
import platform
import sys
import traceback
from pathlib import Path
from types import ModuleType


def leave(path: Path, data: bytes) -> None:
    """A file, whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def check(folder: Path) -> ModuleType:
    """cloudpickle. Refuses what another Python, or another cloudpickle, would misread."""
    made_by = json.loads((folder / "made_by.json").read_text())
    here = platform.python_version()
    if here.split(".")[:2] != made_by["python"].split(".")[:2]:
        sys.exit(
            f"this is Python {here} ({sys.executable}), and the function comes from Python {made_by['python']}: name an "
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
            f"{sys.executable} has cloudpickle {cloudpickle.__version__}, and the function comes from {made_by['cloudpickle']}: "
            "install that one"
        )
    return cloudpickle


def main(folder: Path) -> None:
    """Call, and leave the result: of several processes that of the first."""
    cloudpickle = check(folder)
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    job = os.environ["SLURM_JOB_ID"]
    try:
        function, args, kwargs = cloudpickle.loads((folder / "call.pkl").read_bytes())
        result = cloudpickle.dumps(function(*args, **kwargs))
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = None
        if first:
            leave(folder / f"{job}.exception", cloudpickle.dumps((text, pickled)))
        sys.stderr.write(text)
        sys.exit(1)
    if first:
        leave(folder / f"{job}.result", result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
