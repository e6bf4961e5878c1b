"""Where a job writes its output: resolves the patterns that scontrol leaves in a file's name.

slurmd replaces the patterns when the batch script starts (sbatch(1), "filename pattern"). `scontrol show job` of Slurm 22.05
replaces only %A, %a, %j, %u and %x, and leaves %% as it is.

slurmd replaces %N by the name of its host. Here it is the node's name, the same at nearly all sites. Where it differs, the
file is missing under that name, and the answer names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PATTERN = re.compile(r"%([0-9]*)([%AaJjNnstuxb])")

_NUMBER = re.compile(r"[0-9]{1,10}")

LONGEST = 4095
"""Bytes of a path. No file has a longer one."""


def resolved(path: str, told: Mapping[str, str]) -> str:
    """The file that the batch script opens; empty: no file can have such a name.

    A pattern that is not known here stays, as slurmd leaves it.

    Args:
        path: StdOut or StdErr of `scontrol show job`.
        told: other fields of it: JobId, JobName, UserId, BatchHost and, of an array's element, ArrayJobId and ArrayTaskId. What
            the user wrote may look like these, so each can hold any text.
    """
    if "\\" in path:
        return path.replace("\\", "")  # a backslash switches all patterns off
    number, element = told.get("JobId", ""), told.get("ArrayTaskId", "")
    values = {
        "%": "%",
        "A": told.get("ArrayJobId", number),
        "a": element,
        "b": str(int(element) % 10) if _NUMBER.fullmatch(element) else "",
        "J": number,
        "j": number,
        "N": told.get("BatchHost", "").split(".")[0],
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": told.get("UserId", "").partition("(")[0],
        "x": told.get("JobName", ""),
    }

    def value(found: re.Match[str]) -> str:
        width, kind = found.groups()
        text = values[kind][:LONGEST]
        if not text:
            return found[0]
        return text.zfill(min(int(width[:10]), 10)) if width and _NUMBER.fullmatch(text) else text

    found = _PATTERN.sub(value, path)
    return found if len(found.encode(errors="replace")) <= LONGEST else ""
