"""What Slurm and Penstock tell a job through environment variables. Nothing else in this package reads the environment."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.wire import PROFILE_VARIABLE, SPOOL_VARIABLE

MOST_NAMES = 100_000
"""A host list of more names is a mistake: no Slurm has so many nodes."""


class EnvironmentDisagrees(RuntimeError):
    """Two of Slurm's variables contradict each other, so the job cannot know what it has."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One process's view of its job. Outside Slurm all is empty."""

    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    """All nodes of the job, in Slurm's order."""
    node: str | None = None
    """The node of this process: on a loopback cluster the host's name says nothing, so it is Slurm's word."""
    gpus_on_node: int = 0
    gpu_ids: tuple[int, ...] = ()
    """Indices of the job's GPUs on this node, as Slurm counts them."""
    restarts: int = 0
    """Slurm's count, for people to read: it can repeat after a crash of the controller, an epoch cannot."""
    spool: Path | None = None
    """The folder shared with the daemon; None without Penstock."""
    profile: Path | None = None
    """File with the request of `penstock profile`; None if that does not run this process."""
    array_element: str | None = None
    """`12_3` for element 3 of array 12. A job that an element submits inherits its variables, so this may be another's."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """What `environ` (None: this process's own) says of the job.

    Raises:
        EnvironmentDisagrees: the variables contradict each other, or one is not in Slurm's form; the message names it.
    """
    environ = os.environ if environ is None else environ
    spool = Path(environ[SPOOL_VARIABLE]) if environ.get(SPOOL_VARIABLE) else None
    profile = Path(environ[PROFILE_VARIABLE]) if environ.get(PROFILE_VARIABLE) else None
    job_id = environ.get("SLURM_JOB_ID") or None
    if job_id is None:
        return Environment(spool=spool, profile=profile)
    nodes = _nodes(environ)
    node = environ.get("SLURMD_NODENAME") or None
    if node is not None and nodes and node not in nodes:
        raise EnvironmentDisagrees(
            f"SLURMD_NODENAME={node} is not in SLURM_JOB_NODELIST={environ['SLURM_JOB_NODELIST']}; "
            "was the environment of another job exported into this one?"
        )
    gpu_ids, gpus = _gpus(environ)
    restarts = _number(environ, "SLURM_RESTART_COUNT") or 0
    array, task = _number(environ, "SLURM_ARRAY_JOB_ID"), _number(environ, "SLURM_ARRAY_TASK_ID")
    element = None if array is None or task is None else f"{array}_{task}"
    return Environment(job_id, nodes, node, gpus, gpu_ids, restarts, spool, profile, element)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Names in Slurm's short form: `t4-[00-02,05],x` is t4-00, t4-01, t4-02, t4-05 and x. "" is none.

    Raises:
        ValueError: not a host list.
    """
    names = [name for item in re.split(r",(?![^\[]*\])", text) if text for name in _expand_item(item, text)]
    return tuple(names)


def _expand_item(item: str, text: str) -> list[str]:
    if not re.fullmatch(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", item):
        raise ValueError(f"{text!r} is not a host list of Slurm's, such as t4-[00-02,05]")
    choices: list[list[str]] = []
    for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
        choices.append([part])
        if part.startswith("["):
            bounds = [(first, last or first) for first, _, last in (r.partition("-") for r in part[1:-1].split(","))]
            if sum(abs(int(last) - int(first)) for first, last in bounds) > MOST_NAMES:
                raise ValueError(f"{text!r} is not a host list: more than {MOST_NAMES} names")
            choices[-1] = [str(n).zfill(len(a)) for a, b in bounds for n in range(int(a), int(b) + 1)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = environ.get("SLURM_JOB_NODELIST", "")
    try:
        nodes = expand_hostlist(text)
    except ValueError as error:
        raise EnvironmentDisagrees(f"SLURM_JOB_NODELIST: {error}") from None
    count = _number(environ, "SLURM_JOB_NUM_NODES")
    if nodes and count is not None and count != len(nodes):
        raise EnvironmentDisagrees(f"SLURM_JOB_NUM_NODES={count}, but SLURM_JOB_NODELIST={text} names {len(nodes)}")
    return nodes


def _gpus(environ: Mapping[str, str]) -> tuple[tuple[int, ...], int]:
    """Indices and number of this process's GPUs.

    In a step SLURM_JOB_GPUS and SLURM_GPUS_ON_NODE may be those of the batch script's node, so the step's own win.
    Only numbers are compared with CUDA_VISIBLE_DEVICES: where Slurm confines devices, it counts from 0 anew, and a user
    may well hide some.
    """
    name = "SLURM_STEP_GPUS" if environ.get("SLURM_STEP_GPUS") else "SLURM_JOB_GPUS"
    listed = environ.get(name, "")
    try:
        ids = tuple(int(word) for word in listed.split(",") if word)
    except ValueError:
        raise EnvironmentDisagrees(f"{name}={listed} is not a list of GPU indices, such as 0,1") from None
    on_node = _number(environ, "SLURM_GPUS_ON_NODE")
    if ids and name == "SLURM_JOB_GPUS" and on_node is not None and on_node != len(ids):
        raise EnvironmentDisagrees(f"SLURM_GPUS_ON_NODE={on_node}, but SLURM_JOB_GPUS={listed} names {len(ids)}")
    gpus = len(ids) or on_node or 0
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    shown = [word for word in visible.split(",") if word and word != "NoDevFiles"]
    if gpus and len(shown) > gpus:
        raise EnvironmentDisagrees(
            f"CUDA_VISIBLE_DEVICES={visible} shows {len(shown)} GPUs where Slurm gave {gpus}; do not set it in the job"
        )
    return ids, gpus


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdigit():
        raise EnvironmentDisagrees(f"{name}={text} is not a number; Slurm sets it, do not set it in the job")
    return int(text)
