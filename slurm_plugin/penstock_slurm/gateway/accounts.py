"""Parses what sacctmgr, sacct and sshare print: limits, runs and fair shares. Starts no process."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from penstock_slurm.gateway.base import ENDED, SlurmEnd, SlurmLimit, SlurmQos, SlurmRun
from penstock_slurm.gateway.fields import SIZE, megabytes
from penstock_slurm.gateway.hostlist import HostLists
from penstock_slurm.gateway.parse import exempt_s, frees_gpus

TRES_COUNT = re.compile(r"(?:^|,)(cpu|node)=(\d{1,9})(?=,|$)")
TRES_MEMORY = re.compile(rf"(?:^|,)mem=({SIZE.pattern})(?=,|$)")
TRES_GPUS = re.compile(r"(?:^|,)gres/gpu(?::([^=,]+))?=(\d+)")

NUMBER = "ID%20"
"""The number of a record in Slurm's database, as its first field. Slurm's commands print a field twice only in two widths."""

QOS_FIELDS = (NUMBER, "Name", "GrpTRES", "MaxTRESPerUser", "MaxTRESPerAccount", "ID")
PREEMPTING_FIELDS = (NUMBER, "Name", "Preempt", "PreemptMode", "PreemptExemptTime", "GraceTime", "ID")
EACH: tuple[Literal["", "user", "account"], ...] = ("", "user", "account")
"""To whom each limit of QOS_FIELDS applies, in their order."""
ASSOCIATION_FIELDS = (NUMBER, "Account", "ParentName", "User", "Partition", "GrpTRES", "ID")
SHARE_FIELDS = (NUMBER, "Account", "User", "FairShare", "ID")

RUN_FIELDS = ("JobID", "Start", "End", "NodeList", "AllocTRES")


def parse_tres(text: str) -> dict[str, int]:
    """GPUs by type of TRES such as `cpu=4,gres/gpu=2,gres/gpu:a100=2`; the type "" is all together."""
    return {gpu_type: int(count) for gpu_type, count in TRES_GPUS.findall(text)}


def parse_counts(text: str) -> dict[str, int]:
    """CPUs (`cpu`) and nodes (`node`) of TRES such as `cpu=4,mem=2500M,node=1`, as far as they can be read."""
    return {name: int(count) for name, count in TRES_COUNT.findall(text)}


def parse_memory(text: str) -> int:
    """Memory in MB of TRES such as `cpu=4,mem=2500M,node=1`; 0 if it has none that can be read."""
    found = TRES_MEMORY.search(text)
    return megabytes(found[1]) if found is not None else 0


def parse_qos(text: str, lost: list[str]) -> tuple[SlurmLimit, ...]:
    """Limits from `sacctmgr -nP show qos` with QOS_FIELDS. Records that cannot be read are added to `lost`."""
    return tuple(
        SlurmLimit(gpus, gpu_type, qos=name, each=each)
        for name, *limits in _records(text, len(QOS_FIELDS), lost)
        for tres, each in zip(limits, EACH, strict=True)
        for gpu_type, gpus in parse_tres(tres).items()
    )


def parse_preempting(text: str, lost: list[str]) -> tuple[SlurmQos, ...]:
    """QOS from `sacctmgr -nP show qos` with PREEMPTING_FIELDS. Records that cannot be read are added to `lost`."""
    return tuple(
        SlurmQos(
            name,
            frozenset(filter(None, preempts.split(","))),
            None if mode in ("", "cluster") else frees_gpus(mode),
            exempt_s(exempt) if exempt else None,
            exempt_s(grace) if grace else 0.0,
        )
        for name, preempts, mode, exempt, grace in _records(text, len(PREEMPTING_FIELDS), lost)
    )


def parse_associations(text: str, lost: list[str]) -> tuple[SlurmLimit, ...]:
    """Limits from `sacctmgr -nP show assoc` with ASSOCIATION_FIELDS. An account's limit includes the accounts below it.

    Records that cannot be read are added to `lost`.
    """
    rows = _records(text, len(ASSOCIATION_FIELDS), lost)
    below: dict[str, list[str]] = {}
    for account, parent, user, *_ in rows:
        if not user:
            below.setdefault(parent, []).append(account)

    def with_those_below(account: str) -> tuple[str, ...]:
        found = {account: None}
        for each in (waiting := [account]):
            new = [child for child in below.get(each, ()) if child not in found]
            found |= dict.fromkeys(new)
            waiting += new
        return tuple(found)

    return tuple(
        SlurmLimit(gpus, gpu_type, accounts=(account,) if user else with_those_below(account), user=user)
        for account, _, user, partition, tres in rows
        for gpu_type, gpus in parse_tres(tres).items()
        if not partition
    )


def parse_fair_shares(text: str, lost: list[str]) -> dict[tuple[str, str], float]:
    """(account, user) -> factor, from `sshare -nPa` with SHARE_FIELDS. Skips the records of accounts, which have none.

    Records that cannot be read are added to `lost`.
    """
    found: dict[tuple[str, str], float] = {}
    for account, user, factor in _records(text, len(SHARE_FIELDS), lost):
        if user and factor:
            try:
                found[account, user] = float(factor)
            except ValueError:
                lost.append(f"{account}|{user}|{factor}")
    return found


def parse_runs(text: str, lost: list[str]) -> tuple[SlurmRun, ...]:
    """Ended runs, from `sacct -D -X -n -P` with RUN_FIELDS and SLURM_TIME_FORMAT=%s.

    Lines that cannot be read are added to `lost`.
    """
    runs = []
    names = HostLists()
    for job_id, start, end, nodes, tres in _rows(text, len(RUN_FIELDS), lost):
        try:
            if start.isdigit() and end.isdigit() and int(end) >= int(start):
                runs.append(SlurmRun(job_id, float(start), float(end), names[nodes], parse_tres(tres).get("", 0)))
        except ValueError:
            lost.append(f"{job_id}|{start}|{end}|{nodes}|{tres}")
    return tuple(runs)


END_FIELDS = ("JobID", "Submit", "State", "ExitCode", "End")
RUNS_AGAIN = frozenset({"REQUEUED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
"""States of a record after which the next record of the id may be the next run of the same job."""


def parse_ends(text: str, lost: list[str]) -> dict[str, SlurmEnd]:
    """Job -> how it ended, from `sacct -D -X -n -P` with END_FIELDS and SLURM_TIME_FORMAT=%s.

    A job that Slurm requeued has a record for each run, and its newest one counts: Slurm gives each a later time of submission. A
    job whose newest record has no end is left out. Lines that cannot be read are added to `lost`.
    """
    rows = [row for row in _rows(text, len(END_FIELDS), lost) if row[1].isdigit()]
    found: dict[str, SlurmEnd | None] = {}
    first: dict[str, tuple[str, int]] = {}
    """Job -> the state of its newest record so far, and when the job was first submitted."""
    for job_id, submit, state, exit_code, end in sorted(rows, key=lambda row: int(row[1])):
        word = state.split(" ")[0]  # a cancelled job's is `CANCELLED by 1000`
        before, first_s = first.get(job_id, ("", 0))
        first_s = first_s if before in RUNS_AGAIN else int(submit)  # else Slurm has given the id again
        first[job_id] = word, first_s
        code, _, number = exit_code.partition(":")
        status = None
        if code.isdigit():
            status = int(code) or (128 + int(number) if number.isdigit() and int(number) else 0)
        has_ended = word in ENDED and end.isdigit()
        found[job_id] = SlurmEnd(word, status, float(end), float(first_s)) if has_ended else None
    return {job_id: end for job_id, end in found.items() if end is not None}


def _rows(text: str, width: int, lost: list[str]) -> list[list[str]]:
    """The fields of lines that are separated by bars. Lines of another number of fields are added to `lost`."""
    rows = [line.split("|") for line in text.split("\n") if line]
    lost += ["|".join(row) for row in rows if len(row) != width]
    return [row for row in rows if len(row) == width]


def _records(text: str, width: int, lost: list[str]) -> list[list[str]]:
    """The fields of records that have their number in Slurm's database at both ends, without it. Accounts are indented by their
    depth.

    Coordinators can write bars and newlines into the names of accounts. So a record is a line with the same number at both ends,
    which no other line has at one of its ends. A line without it begins a record of several lines. All other text is added to
    `lost`.
    """
    rows = [line.split("|") for line in text.split("\n") if line]
    ends = Counter(number for row in rows for number in {row[0], row[-1]})
    found, at = [], 0
    while at < len(rows):
        first, last = rows[at], at
        number = first[0] if first[0].isdigit() else None
        if number is not None and first[-1] != number:
            last = next((end for end in range(at, len(rows)) if rows[end][-1] == number), at)
        if number is not None and first[-1] == number and len(first) == width and ends[number] == 1:
            found.append([field.strip() for field in first[1:-1]])
        else:
            lost.append("\n".join("|".join(row) for row in rows[at : last + 1]))
        at = last + 1
    return found
