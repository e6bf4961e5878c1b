"""A large site as Slurm's commands show it: `StubSite` writes the answers, and scripts in place of the commands print them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.wire import (
    ControlMessage,
    Observation,
    Report,
    Started,
    control_file,
    inbox_folder,
    reports_file,
)
from penstock_slurm.gateway import abilities
from penstock_slurm.gateway.parse_jobs import job_fields

SCONTROL = """#!/bin/sh
for word; do
    case $word in
        node|partition|reservation|config|topology) exec cat "{folder}/$word" ;;
        -V) echo "slurm-wlm 22.05.8"; exit 0 ;;
    esac
done
exit 0
"""

SQUEUE = """#!/bin/sh
case $* in
    *"-t all"*) echo "-t all" >>"{folder}/asked" ;;
    *"-o %i %T"*) exec cat "{folder}/states" ;;
esac
separator=${{SQUEUE_FORMAT2#JobID:0}}
separator=${{separator%%,*}}
exec sed "s/|$/${{SQUEUE_FORMAT2##*:0}}/; s/|/$separator/g" "{folder}/jobs"
"""
"""Answers in the order of `JOB_FIELDS`, with `|` for both marks."""

JOB_FIELDS = job_fields(abilities.release((22, 5)))

GPUS = 8
"""GPUs of a node."""

BEGAN_S = 1_700_000_000
"""When the first of the running jobs began, s since 1970."""


@dataclass(frozen=True)
class StubSite:
    """A site whose nodes are all in use.

    Args:
        folder: for the commands and their answers.
        spool: the spool folder.
        nodes: nodes with 8 GPUs each.
        running: jobs that run, on equally many GPUs of one node each.
        waiting: jobs that wait; no two records are alike.
    """

    folder: Path
    spool: Path
    nodes: int
    running: int
    waiting: int

    def write(self, now_s: float) -> None:
        """Write the commands and their answers, and what the runs have reported so far."""
        (self.folder / "bin").mkdir(parents=True)
        for name, script in (("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", "#!/bin/sh\n")):
            path = self.folder / "bin" / name
            path.write_text(script.format(folder=self.folder))
            path.chmod(0o755)
        self.write_nodes()
        names = self._node_names()
        (self.folder / "partition").write_text(
            f"PartitionName=gpu Default=YES MaxTime=UNLIMITED Nodes={names[0][:1]}[0000-{self.nodes - 1:04}] State=UP\n"
        )
        (self.folder / "reservation").write_text("No reservations in the system\n")
        (self.folder / "topology").write_text("")
        (self.folder / "config").write_text(
            "AccountingStorageType   = (null)\nAccountingStorageEnforce = none\nAccountingStorageTRES    = cpu\n"
            "ClusterName             = stub\nPriorityType            = priority/basic\nTopologyPlugin          = (null)\n"
            "SelectTypeParameters    = CR_CORE\n"
        )
        for index in range(self.running):
            self._start(index, now_s)
        self.write_jobs(now_s)

    def _node_names(self) -> list[str]:
        return [f"n{index:04}" for index in range(self.nodes)]

    def write_nodes(self) -> None:
        """Write the answer to `scontrol show node`."""
        lines = [
            f"NodeName={name} Arch=x86_64 CoresPerSocket=32 CPUAlloc=64 CPUEfctv=64 CPUTot=64 CPULoad=31.15 "
            f"AvailableFeatures=a100 ActiveFeatures=a100 Gres=gpu:a100:{GPUS} GresDrain=N/A GresUsed=gpu:a100:{GPUS}(IDX:0-7) "
            f"NodeAddr={name} NodeHostName={name} Version=22.05.8 OS=Linux 6.1.0-18-amd64 #1 SMP RealMemory=1031000 "
            f"AllocMem=0 FreeMem=781233 Sockets=2 Boards=1 State=ALLOCATED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A "
            "MCS_label=N/A Partitions=gpu BootTime=2026-11-01T00:00:00 SlurmdStartTime=2026-11-01T00:01:00 "
            "CfgTRES=cpu=64,mem=1031000M,billing=64 AllocTRES=cpu=64 CapWatts=n/a"
            for name in self._node_names()
        ]
        (self.folder / "node").write_text("\n".join(lines) + "\n")

    def write_jobs(self, now_s: float) -> None:
        """Write the answer to squeue at this time. The time that each job has run grows."""
        records = [self._running(index, now_s) for index in range(self.running)]
        records += [self._waiting(index, now_s) for index in range(self.waiting)]
        job, state = JOB_FIELDS.index("JobID"), JOB_FIELDS.index("State")
        (self.folder / "states").write_text("".join(f"{record[job]} {record[state]}\n" for record in records))
        path = self.folder / "jobs.new"
        path.write_text("".join(f"{'|'.join(record)}|\n" for record in records))
        path.rename(self.folder / "jobs")

    def job_id(self, index: int) -> str:
        """Id of a running job."""
        return str(1000 + index)

    def _each_gpus(self) -> int:
        return self.nodes * GPUS // self.running

    def _node_of(self, index: int) -> str:
        return f"n{index * self.nodes // self.running:04}"

    def _running(self, index: int, now_s: float) -> list[str]:
        start_s = BEGAN_S + index
        ran_s = int(now_s) - start_s
        days, rest = divmod(ran_s, 86_400)
        ran = f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
        node = self._node_of(index)
        return self._record(
            self.job_id(index),
            "RUNNING",
            index,
            node,
            node,
            start_s - 100,
            start_s,
            ran,
            tasks=1,
            gpus=self._each_gpus(),
        )

    def _waiting(self, index: int, now_s: float) -> list[str]:
        submit_s = BEGAN_S + 100_000 + index
        return self._record(str(100_000 + index), "PENDING", index + self.running, "", "", submit_s, None, "0:00")

    def _record(
        self,
        job: str,
        state: str,
        index: int,
        nodes: str,
        required: str,
        submit_s: int,
        start_s: int | None,
        ran: str,
        tasks: int = 1,
        gpus: int = 1,
    ) -> list[str]:
        spec = {"penstock": {"min_gpus": 1 + index % 3, "max_gpus": 8 + index % 57, "gpu_types": ["a100"]}}
        fields = {
            "JobID": job,
            "ArrayJobID": job,
            "ArrayTaskID": "N/A",
            "HetJobID": "N/A",
            "State": state,
            "Reason": "None" if start_s else "JobHeldUser",
            "Partition": "gpu",
            "Name": f"train-{index}",
            "UserName": f"user{index % 300}",
            "UserID": str(20_000 + index % 300),
            "Account": f"group{index % 40}",
            "QOS": "normal",
            "NodeList": nodes,
            "ReqNodes": required,
            "NumNodes": "1",
            "tres-per-node": f"gres:gpu:{gpus}",
            "NumCPUs": "32" if start_s else "1",
            "cpus-per-task": "1",
            "NumTasks": str(tasks),
            "comment": "(null)",
            "admin_comment": json.dumps(spec),
            "SubmitTime": str(submit_s),
            "EligibleTime": str(submit_s),
            "StartTime": str(start_s) if start_s else "N/A",
            "EndTime": str(start_s + 31_536_000) if start_s else "N/A",
            "TimeLimit": "365-00:00:00" if start_s else "7-00:00:00",
            "RestartCnt": "0",
            "Requeue": "1",
            "PriorityLong": "4294901000" if start_s else "0",
            "Reservation": "(null)",
            "tres-alloc": "cpu=32,node=1,billing=32" if start_s else "cpu=1,node=1,billing=1",
            "Dependency": "(null)",
            "Licenses": "(null)",
            "OverSubscribe": "OK",
            "Deadline": "N/A",
            "TimeUsed": ran,
            "cpus-per-tres": "(null)",
            "MinMemory": "0",
        }
        return [fields[name] for name in JOB_FIELDS]

    def _start(self, index: int, now_s: float) -> None:
        """The control message and the first report of a run."""
        job, gpus = self.job_id(index), self._each_gpus()
        control = ControlMessage(
            job_id=job, epoch=1, round=0, gpu_type="a100", nodes=1, gpus=gpus, cpus=32, submitted_s=1_790_000_000.0
        )
        path = control_file(self.spool, job)
        reports_file(self.spool, job, 1).parent.mkdir(parents=True)
        path.write_text(control.model_dump_json())
        ids = tuple(range(gpus))
        started = Started(gpu_type="a100", gpu_ids={self._node_of(index): ids}, total=1e9)
        self.report(index, 0, now_s, started)

    def report(self, index: int, sequence: int, now_s: float, body: Started | Observation | None = None) -> None:
        """A running job reports once more."""
        gpus = self._each_gpus()
        if body is None:
            body = Observation(
                gpu_type="a100",
                nodes=1,
                gpus=gpus,
                atomic_batch=128,
                steps=60,
                step_time_s=0.31234567 + index % 97 / 1000,
                sync_time_s=0.0123456,
                grad_sqr=0.00123456789,
                grad_var=1.23456789,
                memory_mb=31_234.5,
                progress=1_000_000.0 + sequence * 4096 * gpus,
            )
        report = Report(job_id=self.job_id(index), epoch=1, sequence=sequence, time_s=now_s, body=body)
        with reports_file(self.spool, self.job_id(index), 1).open("a", encoding="utf-8") as file:
            file.write(report.model_dump_json() + "\n")
        if inbox_folder(self.spool).is_dir():
            (inbox_folder(self.spool) / report.job_id).touch()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the commands are found."""
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
