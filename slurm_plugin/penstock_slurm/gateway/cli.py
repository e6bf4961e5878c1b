"""Back end `cli`: Slurm's own commands. Works with every Slurm and needs nothing else; about 5 ms a call."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from penstock_slurm.gateway.base import (
    JobPlacement,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
)
from penstock_slurm.gateway.errors import (
    BackendMissing,
    ControllerAway,
    JobGone,
    Refused,
    TimedOut,
    Transient,
    UnreadableAnswer,
    error_from,
)
from penstock_slurm.gateway.parse import (
    ASSOCIATION_FIELDS,
    QOS_FIELDS,
    parse_associations,
    parse_fair_shares,
    parse_features,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_qos,
    parse_reservations,
    parse_switches,
    parse_version,
    squeue_format,
)

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

COMMANDS = ("scontrol", "squeue", "scancel")

KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Slurm's variables that say which Slurm and who we are. All others change what commands print or do."""

RETRIES = 2
RETRY_PAUSE_S = 0.2
"""Slurm 24.11 refused 1 of 540 updates with `Resource temporarily unavailable`; the next try went through."""

LONGEST_TEXT = 100_000
"""Bytes of an admin comment. Linux takes 131,072 in one argument of a command."""

JOB_ID = re.compile(r"\d+(_\d+)?")


class CliGateway:
    """Slurm through scontrol, squeue, scancel and, with accounting, sacctmgr and sshare; see `Gateway` for each method."""

    def __init__(self, *, conf: Path | None, timeout_s: float) -> None:
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise BackendMissing(
                f"not on PATH ({os.environ.get('PATH', '')}); install Slurm's commands (Debian: slurm-client) or add "
                "their folder to PATH",
                command=", ".join(missing),
            )
        self._timeout_s = timeout_s
        self._environment = _environment(os.environ, conf)

    def version(self) -> tuple[int, int]:
        """Of the commands on this machine."""
        return _read(parse_version, self._ask("scontrol", "-V"), "scontrol -V")

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes that slurmctld shows."""
        return _read(parse_nodes, self._ask("scontrol", "-a", "-o", "-d", "show", "node"), "scontrol show node")

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """All partitions, hidden ones too."""
        return _read(
            parse_partitions, self._ask("scontrol", "-a", "-o", "show", "partition"), "scontrol show partition"
        )

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs, each array element for itself.

        The separator goes through the environment, which unlike the command's arguments other users cannot see: who
        knew it could write it into a comment and forge jobs. It must not start with a digit (the field's size does).
        """
        separator = f"~{secrets.token_hex(8)}"
        states = ("-t", "all") if finished else ()
        variables = {"SQUEUE_FORMAT2": squeue_format(separator), "SLURM_TIME_FORMAT": "%s"}
        text = self._ask("squeue", "-a", "-h", "-r", "--local", *states, variables=variables)
        return _read(lambda answer: parse_jobs(answer, separator), text, "squeue")

    def describe(self, job_id: str) -> str:
        """One job in scontrol's words."""
        _expect_id(job_id)
        variables = {"SLURM_TIME_FORMAT": "%s"}
        done = self._run(("scontrol", "-a", "-o", "show", "job", job_id), variables, job_id)
        if done.returncode != 0:
            raise error_from(done.stderr or done.stdout, command="scontrol show job", job_id=job_id)
        return done.stdout

    def reservations(self) -> tuple[SlurmReservation, ...]:
        """All reservations."""
        variables = {"SLURM_TIME_FORMAT": "%s"}
        text = self._ask("scontrol", "-a", "-o", "show", "reservation", variables=variables)
        return _read(parse_reservations, text, "scontrol show reservation")

    def features(self) -> SlurmFeatures:
        """What is switched on in slurm.conf."""
        return _read(parse_features, self._ask("scontrol", "show", "config"), "scontrol show config")

    def switches(self) -> dict[str, str]:
        """Node -> leaf switch."""
        return _read(parse_switches, self._ask("scontrol", "show", "topology"), "scontrol show topology")

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        """Limits of QOS and associations: two calls of sacctmgr."""
        qos = self._ask("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_FIELDS)}")
        where = (f"cluster={cluster}", f"format={','.join(ASSOCIATION_FIELDS)}")
        associations = self._ask("sacctmgr", "-nP", "show", "assoc", *where)
        return (
            *_read(parse_qos, qos, "sacctmgr show qos"),
            *_read(parse_associations, associations, "sacctmgr show assoc"),
        )

    def fair_shares(self) -> dict[tuple[str, str], float]:
        """(account, user) -> fair-share factor."""
        return _read(parse_fair_shares, self._ask("sshare", "-nPa", "-o", "Account,User,FairShare"), "sshare")

    def hold(self, job_id: str) -> None:
        """`scontrol hold`: the priority becomes 0 until an admin's release."""
        self._write(job_id, "scontrol", "hold", job_id)

    def release(self, job_id: str) -> None:
        """`scontrol release`."""
        self._write(job_id, "scontrol", "release", job_id)

    def requeue_hold(self, job_id: str) -> None:
        """`scontrol requeuehold Incomplete`; without that word 22.05 brings cancelled jobs back."""
        self._write(job_id, "scontrol", "requeuehold", "Incomplete", job_id)

    def cancel(self, job_id: str) -> None:
        """`scancel -v`: without -v it is silent about jobs that do not exist."""
        self._write(job_id, "scancel", "-v", job_id)

    def place(self, job_id: str, placement: JobPlacement) -> None:
        """One `scontrol update`, so that Slurm takes all of it or nothing.

        NumNodes=n-n because a job with -N1 refuses NumNodes=2; StartTime=now because requeued jobs wait two minutes.
        """
        count = len(placement.nodes)
        self._write(
            job_id,
            "scontrol",
            "update",
            f"JobId={job_id}",
            f"Partition={placement.partition}",
            f"NumNodes={count}-{count}",
            *([] if placement.tasks is None else [f"NumTasks={placement.tasks}"]),
            f"NumCPUs={placement.cpus}",
            *([] if placement.cpus_per_task is None else [f"CPUsPerTask={placement.cpus_per_task}"]),
            *([] if placement.memory_mb_per_node is None else [f"MinMemoryNode={placement.memory_mb_per_node}"]),
            f"TresPerNode=gres:gpu:{placement.gpus_per_node}",
            f"ReqNodeList={','.join(placement.nodes)}",
            "StartTime=now",
        )

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """`scontrol update AdminComment=`, the text in one argument."""
        if "\0" in text or len(text.encode(errors="replace")) > LONGEST_TEXT:
            raise Refused(
                f"an admin comment is at most {LONGEST_TEXT} bytes without NUL; shorten it",
                command="scontrol update AdminComment",
                job_id=job_id,
            )
        self._write(job_id, "scontrol", "update", f"JobId={job_id}", f"AdminComment={text}")

    def _ask(self, *argv: str, variables: Mapping[str, str] | None = None) -> str:
        """What a reading command prints."""
        done = self._run(argv, variables or {})
        if done.returncode != 0 or "error:" in done.stderr:
            otherwise = ControllerAway if done.returncode else UnreadableAnswer  # 0: an unknown field, say
            raise error_from(done.stderr or done.stdout, command=argv[0], otherwise=otherwise)
        return done.stdout

    def _write(self, job_id: str, *argv: str) -> None:
        """Run a command that changes a job; what passes by itself is tried again."""
        _expect_id(job_id)
        self._again(lambda: self._write_once(job_id, argv))

    def _write_once(self, job_id: str, argv: tuple[str, ...]) -> None:
        done = self._run(argv, {}, job_id)
        # scancel of a job that is gone, and scontrol update with a bad number, print an error and return 0
        if done.returncode != 0 or "error:" in done.stderr:
            raise error_from(done.stderr or done.stdout, command=" ".join(argv[:2]), job_id=job_id)

    def _again(self, write: Callable[[], None]) -> None:
        """Call `write`, and twice more where Slurm could not now. A time-out is not repeated: it has cost enough."""
        for left in range(RETRIES, -1, -1):
            try:
                write()
                return
            except Transient as error:
                if left == 0 or isinstance(error, TimedOut):
                    raise
                log.info("asking Slurm again", extra={"job": error.job_id, "text": error.text})
                time.sleep(RETRY_PAUSE_S)

    def _run(
        self, argv: tuple[str, ...], variables: Mapping[str, str], job_id: str = ""
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                argv,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # comments hold any bytes
                timeout=self._timeout_s,
                env={**self._environment, **variables},
            )
        except subprocess.TimeoutExpired:
            text = f"no answer in {self._timeout_s:g} s"
            raise TimedOut(text, command=" ".join(argv[:2]), job_id=job_id) from None
        except OSError as error:
            raise Transient(f"could not be started: {error}", command=argv[0], job_id=job_id) from error


def _expect_id(job_id: str) -> None:
    if JOB_ID.fullmatch(job_id) is None:
        raise JobGone("no job has such an id: expected 12 or, for an array's element, 12_3", command="", job_id=job_id)


def _environment(mine: Mapping[str, str], conf: Path | None) -> dict[str, str]:
    """Ours without what a user set to change the commands' output, in the C locale."""
    environment = {
        key: value
        for key, value in mine.items()
        if key in KEPT or not key.startswith(("SLURM_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_"))
    }
    environment["LC_ALL"] = "C"
    if conf is not None:
        environment["SLURM_CONF"] = str(conf)
    return environment


def _read(parse: Callable[[str], Answer], text: str, command: str) -> Answer:
    try:
        return parse(text)
    except (ValueError, KeyError, IndexError) as error:
        raise UnreadableAnswer(f"{error!r} in an answer of {len(text)} characters", command=command) from error
