"""What Slurm and Penstock tell a job by environment variables. No other module of this package reads them."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock_profiles.node_channel import RUN_DIR, RUN_DIR_VARIABLE, run_dir
from penstock_profiles.wire import (
    MEASURING_REPORT_S,
    MEASURING_VARIABLE,
    PROFILE_VARIABLE,
    SPOOL_VARIABLE,
    URL_VARIABLE,
    api_urls,
)

TOKEN_VARIABLE = "PENSTOCK_TOKEN"  # noqa: S105
log = logging.getLogger(__name__)

CONTINUE_VARIABLE = "PENSTOCK_CONTINUE"
"""Environment variable with the argument `continue_from` of `start`, so that no script has to be changed for it."""

LEFT_NODES_VARIABLE = "PENSTOCK_LEFT_NODES"
"""Environment variable with the nodes that the job's runs have given up, with commas between them."""
AUTHORITY_VARIABLE, MUNGE_SOCKET_VARIABLE = "PENSTOCK_CA", "PENSTOCK_MUNGE_SOCKET"

MOST_NAMES = 100_000
"""The most names in a host list. A longer list is a mistake: no cluster has so many nodes."""


class EnvironmentDisagrees(RuntimeError):
    """Two of Slurm's variables contradict each other, so the job cannot tell what it has."""


@dataclass(frozen=True, slots=True)
class Service:
    """penstockd's HTTP API, and how the job proves its identity. The command line uses the same variables
    (docs/user/api.md)."""

    urls: tuple[str, ...]
    """One for each penstockd; see `api_urls`."""
    token: str | None = field(default=None, repr=False)
    """Bearer token; None: MUNGE proves the user's identity."""
    authority: Path | None = None
    """File with certificates (PEM) to trust for https; None: those that the system trusts."""
    munge_socket: Path | None = None
    """Path of MUNGE's socket; None: MUNGE's default."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One process's view of its job. Outside Slurm, all fields are empty."""

    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    """All nodes of the job, in Slurm's order."""
    node: str | None = None
    """The node of this process, by Slurm's name. The host's name may differ, as on a loopback cluster."""
    gpus_on_node: int = 0
    gpu_ids: tuple[int, ...] = ()
    """Indices of the job's GPUs on this node, as Slurm counts them."""
    restarts: int = 0
    """Slurm's count, for people to read. Unlike an epoch, it can repeat after a crash of Slurm's controller."""
    spool: Path | None = None
    """The folder shared with the daemon; None: there is none."""
    profile: Path | None = None
    """File with the request of `penstock profile run`; None if this process does not run under that command."""
    array_element: str | None = None
    """`12_3` for element 3 of array 12. A job that an array element submits inherits this variable from it."""
    service: Service | None = None
    """Where reports go from a node without the spool; None: nowhere."""
    measuring: Path | None = None
    """Folder for the checkpoints of a run of `penstock profile sensitivity measure`; None if this is not such a run."""
    run_dir: Path | None = None
    """Folder of the node's agent, which may not exist; None outside Slurm."""
    visible_devices: str = ""
    """CUDA_VISIBLE_DEVICES."""
    left_nodes: tuple[str, ...] = ()
    """Nodes that the job's runs have given up. Slurm may still count them."""
    continues: str | None = None
    """The ended job whose training this one continues, or the folder of its checkpoints."""
    relaunched: bool = False
    """Whether torchrun has started the script again, after a process of it failed."""

    def report_every_s(self, given_s: float) -> float:
        """Seconds between two reports. `given_s` is the program's choice; runs that measure report more often."""
        return given_s if self.measuring is None else min(given_s, MEASURING_REPORT_S)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """What the variables `environ` say about the job. None: this process's own variables.

    Raises:
        EnvironmentDisagrees: variables contradict each other, or one does not have Slurm's form; the message names it.
    """
    environ = os.environ if environ is None else environ
    spool = Path(environ[SPOOL_VARIABLE]) if environ.get(SPOOL_VARIABLE) else None
    profile = Path(environ[PROFILE_VARIABLE]) if environ.get(PROFILE_VARIABLE) else None
    job_id = environ.get("SLURM_JOB_ID") or None
    if job_id is None:
        return Environment(spool=spool, profile=profile)
    measuring = Path(environ[MEASURING_VARIABLE]) if environ.get(MEASURING_VARIABLE) else None
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
    return Environment(
        job_id,
        nodes,
        node,
        gpus,
        gpu_ids,
        restarts,
        spool,
        profile,
        element,
        _service(environ),
        measuring,
        run_dir(environ.get(RUN_DIR_VARIABLE) or RUN_DIR, node or ""),
        environ.get("CUDA_VISIBLE_DEVICES", ""),
        tuple(filter(None, environ.get(LEFT_NODES_VARIABLE, "").split(","))),
        environ.get(CONTINUE_VARIABLE) or None,
        bool(_number(environ, "TORCHELASTIC_RESTART_COUNT")),
    )


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place among those that train together. A single process is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Place among the job's processes on this node."""
    local_world: int = 1
    nodes: int = 1
    first_node: str | None = None
    """Slurm's name of the node of rank 0; None if `master` is known, or there is only one process."""
    master: str | None = None
    """Address of rank 0, if torchrun or the user set it."""
    port: int = 0
    """Port on which rank 0 listens; 0 if there is only one process."""


def read_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """This process's rank, by the variables of torchrun or of a Slurm step (srun).

    torchrun's variables have priority, since torchrun may itself run in a step, as one task per node. MASTER_ADDR and
    MASTER_PORT, if set, have priority over Slurm's variables. In a batch script without srun there is one process.

    Raises:
        EnvironmentDisagrees: variables contradict each other, or some are missing; the message names them.
    """
    environ = os.environ if environ is None else environ
    found = _torchrun_ranks(environ) if environ.get("RANK") else _step_ranks(environ)
    if not (found.rank < found.world and found.local_rank < found.local_world <= found.world):
        raise EnvironmentDisagrees(
            f"rank {found.rank} of {found.world}, local rank {found.local_rank} of {found.local_world}: no process can"
            " have these ranks; was the environment of another job or step exported into this one?"
        )
    return found


def share(batch_size: int) -> int:
    """Samples of this process, of a batch of `batch_size` over all processes of the job.

    Loops that are configured with a batch for each process, such as those of Hugging Face and Lightning, keep the same total
    batch on any number of GPUs by it.

    Raises:
        ValueError: the number of processes does not divide `batch_size`.
        EnvironmentDisagrees: see `read_ranks`.
    """
    world = read_ranks().world
    if batch_size % world:
        raise ValueError(
            f"a batch of {batch_size} cannot be divided evenly among {world} processes: choose one that every number of GPUs up"
            " to --max-gpus divides, or submit with --scale-unit"
        )
    return batch_size // world


def _torchrun_ranks(environ: Mapping[str, str]) -> Ranks:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise EnvironmentDisagrees(
            f"RANK is set, but {', '.join(missing)} is not; start with torchrun or srun, or unset RANK"
        )
    rank, world, port = (_given(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local_world = _number(environ, "LOCAL_WORLD_SIZE") or 1
    step = _number(environ, "SLURM_STEP_NUM_TASKS")
    if step is not None and step > 1 and "TORCHELASTIC_RUN_ID" not in environ:
        task = _given(environ, "SLURM_PROCID")
        if (rank, world) != (task, step):
            raise EnvironmentDisagrees(
                f"RANK={rank} and WORLD_SIZE={world}, but Slurm's task is {task} of {step}; unset RANK and WORLD_SIZE,"
                " and with torchrun start one task on each node"
            )
    local_rank = _number(environ, "LOCAL_RANK") or 0
    return Ranks(rank, world, local_rank, local_world, max(world // local_world, 1), None, environ["MASTER_ADDR"], port)


def _step_ranks(environ: Mapping[str, str]) -> Ranks:
    world = _number(environ, "SLURM_STEP_NUM_TASKS")
    if not environ.get("SLURM_JOB_ID") or world is None or world == 1:
        return Ranks()
    text = environ.get("SLURM_STEP_NODELIST", "")
    try:
        nodes = expand_hostlist(text)
        counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError as error:
        raise EnvironmentDisagrees(f"SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE: {error}") from None
    if sum(counts) != world or len(counts) != len(nodes):
        raise EnvironmentDisagrees(
            f"SLURM_STEP_NUM_TASKS={world}, but SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')}"
            f" on SLURM_STEP_NODELIST={text} gives {sum(counts)} tasks on {len(counts)} nodes"
        )
    node = _given(environ, "SLURM_NODEID")
    if node >= len(nodes):
        raise EnvironmentDisagrees(f"SLURM_NODEID={node}, but SLURM_STEP_NODELIST={text} has {len(nodes)} nodes")
    return Ranks(
        _given(environ, "SLURM_PROCID"),
        world,
        _given(environ, "SLURM_LOCALID"),
        counts[node],
        len(nodes),
        nodes[0],
        environ.get("MASTER_ADDR") or None,
        _number(environ, "MASTER_PORT") or _port(environ),
    )


def _tasks_per_node(text: str) -> list[int]:
    """Numbers of tasks in Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None or int(match[2] or 1) > MOST_NAMES:
            raise ValueError(f"{text!r} is not a list in Slurm's form, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _port(environ: Mapping[str, str]) -> int:
    """A port that is the same for all tasks of a step, most likely differs between steps, and is not an ephemeral port.

    srun's own port distinguishes the steps of one host even if two clusters on it both have a job 1. The nodes left
    distinguish a run from the one before in the same step.
    """
    names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_SRUN_COMM_PORT"]
    names += [LEFT_NODES_VARIABLE] if environ.get(LEFT_NODES_VARIABLE) else []
    return 10_000 + zlib.crc32(" ".join(environ.get(name, "") for name in names).encode()) % 20_000


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Names in Slurm's short form: `t4-[00-02,05],x` is t4-00, t4-01, t4-02, t4-05 and x. An empty text has no names.

    Raises:
        ValueError: not a host list.
    """
    names = [name for item in re.split(r",(?![^\[]*\])", text) if text for name in _expand_item(item, text)]
    return tuple(names)


def _expand_item(item: str, text: str) -> list[str]:
    if not re.fullmatch(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", item):
        raise ValueError(f"{text!r} is not a host list in Slurm's form, such as t4-[00-02,05]")
    choices: list[list[str]] = []
    for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
        choices.append([part])
        if part.startswith("["):
            bounds = [(first, last or first) for first, _, last in (r.partition("-") for r in part[1:-1].split(","))]
            if sum(abs(int(last) - int(first)) for first, last in bounds) > MOST_NAMES:
                raise ValueError(f"{text!r} is not a host list: it has more than {MOST_NAMES} names")
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

    In a step, SLURM_JOB_GPUS and SLURM_GPUS_ON_NODE may be those of the batch script's node, so the step's own
    variables have priority. With CUDA_VISIBLE_DEVICES only the numbers of GPUs are compared: if Slurm confines devices,
    its indices begin at 0 again, and a user may hide some GPUs.
    """
    name = "SLURM_STEP_GPUS" if environ.get("SLURM_STEP_GPUS") else "SLURM_JOB_GPUS"
    listed = environ.get(name, "")
    try:
        ids = tuple(int(item) for item in listed.split(",") if item)
    except ValueError:
        raise EnvironmentDisagrees(f"{name}={listed} is not a list of GPU indices, such as 0,1") from None
    on_node = _number(environ, "SLURM_GPUS_ON_NODE")
    if ids and name == "SLURM_JOB_GPUS" and on_node is not None and on_node != len(ids):
        raise EnvironmentDisagrees(f"SLURM_GPUS_ON_NODE={on_node}, but SLURM_JOB_GPUS={listed} names {len(ids)}")
    gpus = len(ids) or on_node or 0
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    shown = [item for item in visible.split(",") if item and item != "NoDevFiles"]
    if gpus and len(shown) > gpus:
        raise EnvironmentDisagrees(
            f"CUDA_VISIBLE_DEVICES={visible} shows {len(shown)} GPUs, but Slurm allocated {gpus}; do not set it in the"
            " job"
        )
    return ids, gpus


def _given(environ: Mapping[str, str], name: str) -> int:
    number = _number(environ, name)
    if number is None:
        raise EnvironmentDisagrees(f"{name} is not set, but related variables are; start with srun or torchrun")
    return number


@functools.lru_cache(maxsize=8)
def _urls(text: str) -> tuple[str, ...]:
    """The API's addresses. Without a good one there are no reports, and the training goes on; the log says it once."""
    try:
        return api_urls(text) if text else ()
    except ValueError as error:
        log.warning("no reports go to the API: %s", error)
        return ()


def _service(environ: Mapping[str, str]) -> Service | None:
    urls = _urls(environ.get(URL_VARIABLE, ""))
    if not urls:
        return None
    authority, munge_socket = environ.get(AUTHORITY_VARIABLE), environ.get(MUNGE_SOCKET_VARIABLE)
    return Service(
        urls,
        environ.get(TOKEN_VARIABLE) or None,
        Path(authority) if authority else None,
        Path(munge_socket) if munge_socket else None,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdigit():
        raise EnvironmentDisagrees(f"{name}={text} is not a number; Slurm sets it, so do not set it in the job")
    return int(text)
