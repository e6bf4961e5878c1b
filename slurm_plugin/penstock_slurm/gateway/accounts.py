"""Parses what sacctmgr, sacct and sshare print: limits, runs and fair shares. Starts no process."""

from __future__ import annotations

import re
from typing import Literal

from penstock_slurm.gateway.base import ENDED, SlurmEnd, SlurmLimit, SlurmRun
from penstock_slurm.gateway.hostlist import HostLists

TRES_GPUS = re.compile(r"(?:^|,)gres/gpu(?::([^=,]+))?=(\d+)")

QOS_FIELDS = ("Name", "GrpTRES", "MaxTRESPerUser", "MaxTRESPerAccount")
EACH: tuple[Literal["", "user", "account"], ...] = ("", "user", "account")
"""To whom each limit of QOS_FIELDS applies, in their order."""
ASSOCIATION_FIELDS = ("Account", "ParentName", "User", "Partition", "GrpTRES")

RUN_FIELDS = ("JobID", "Start", "End", "NodeList", "AllocTRES")


def parse_tres(text: str) -> dict[str, int]:
    """GPUs by type of TRES such as `cpu=4,gres/gpu=2,gres/gpu:a100=2`; the type "" is all together."""
    return {gpu_type: int(count) for gpu_type, count in TRES_GPUS.findall(text)}


def parse_qos(text: str) -> tuple[SlurmLimit, ...]:
    """Limits from `sacctmgr -nP show qos` with QOS_FIELDS.

    Raises:
        ValueError: the text has another form.
    """
    return tuple(
        SlurmLimit(gpus, gpu_type, qos=name, each=each)
        for name, *limits in _rows(text, len(QOS_FIELDS))
        for tres, each in zip(limits, EACH, strict=True)
        for gpu_type, gpus in parse_tres(tres).items()
    )


def parse_associations(text: str) -> tuple[SlurmLimit, ...]:
    """Limits from `sacctmgr -nP show assoc` with ASSOCIATION_FIELDS. An account's limit includes the accounts below it.

    Raises:
        ValueError: the text has another form.
    """
    rows = _rows(text, len(ASSOCIATION_FIELDS))
    below: dict[str, list[str]] = {}
    for account, parent, user, *_ in rows:
        if not user:
            below.setdefault(parent, []).append(account)

    def with_those_below(account: str) -> tuple[str, ...]:
        return (account, *(name for child in below.get(account, ()) for name in with_those_below(child)))

    return tuple(
        SlurmLimit(gpus, gpu_type, accounts=(account,) if user else with_those_below(account), user=user)
        for account, _, user, partition, tres in rows
        for gpu_type, gpus in parse_tres(tres).items()
        if not partition
    )


def parse_fair_shares(text: str) -> dict[tuple[str, str], float]:
    """(account, user) -> factor, from `sshare -nPa -o Account,User,FairShare`. Skips the lines of accounts, which have none.

    Raises:
        ValueError: the text has another form.
    """
    return {(account, user): float(factor) for account, user, factor in _rows(text, 3) if user and factor}


def parse_runs(text: str) -> tuple[SlurmRun, ...]:
    """Ended runs, from `sacct -D -X -n -P` with RUN_FIELDS and SLURM_TIME_FORMAT=%s.

    Raises:
        ValueError: the text has another form.
    """
    runs = []
    names = HostLists()
    for job_id, start, end, nodes, tres in _rows(text, len(RUN_FIELDS)):
        if start.isdigit() and end.isdigit() and int(end) >= int(start):
            runs.append(SlurmRun(job_id, float(start), float(end), names[nodes], parse_tres(tres).get("", 0)))
    return tuple(runs)


END_FIELDS = ("JobID", "Submit", "State", "ExitCode", "End")


def parse_ends(text: str) -> dict[str, SlurmEnd]:
    """Job -> how it ended, from `sacct -D -X -n -P` with END_FIELDS and SLURM_TIME_FORMAT=%s.

    A job that Slurm requeued has a record for each run, and its newest one counts: Slurm gives each a later time of submission. A
    job whose newest record has no end is left out.

    Raises:
        ValueError: the text has another form.
    """
    newest: dict[str, tuple[int, SlurmEnd | None]] = {}
    for job_id, submit, state, exit_code, end in _rows(text, len(END_FIELDS)):
        if not submit.isdigit() or int(submit) < newest.get(job_id, (0, None))[0]:
            continue
        word = state.split(" ")[0]  # a cancelled job's is `CANCELLED by 1000`
        if word not in ENDED or not end.isdigit():
            newest[job_id] = int(submit), None
            continue
        code, _, number = exit_code.partition(":")
        status = None
        if code.isdigit():
            status = int(code) or (128 + int(number) if number.isdigit() and int(number) else 0)
        newest[job_id] = int(submit), SlurmEnd(word, status, float(end))
    return {job_id: found for job_id, (_, found) in newest.items() if found is not None}


def _rows(text: str, width: int) -> list[list[str]]:
    """The fields of lines that are separated by bars. Accounts are indented by their depth."""
    rows = [[field.strip() for field in line.split("|")] for line in text.splitlines() if line]
    if any(len(row) != width for row in rows):
        raise ValueError(f"lines are not of {width} fields")
    return rows
