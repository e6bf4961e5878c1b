"""What to tell users about the end of a job in which Penstock had a part."""

from __future__ import annotations

from penstock_slurm.gateway import SlurmJob


def exceeded_memory(job: SlurmJob, memory_mb: int | None) -> str:
    """Tells that a job ended because it exceeded the memory that Penstock allocated, with the remedy; empty for other jobs.

    Where cgroups limit memory, Slurm reports it. With JobAcctGatherParams=OverMemoryKill, Slurm 22.05 only kills the job: state
    FAILED, signal 9, reason JobLaunchFailure.

    Args:
        job: as Slurm knows it after its end.
        memory_mb: what Penstock allocated on a node; None: as much as its user requested.
    """
    if job.state == "OUT_OF_MEMORY":
        how = "ended because it exceeded"
    elif job.state == "FAILED" and (job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal:9")):
        how = "was killed; if its output says that it exceeded a memory limit, it exceeded"
    else:
        return ""
    if memory_mb is None:
        return ""
    return (
        f"{how} the {memory_mb} MB on a node that Penstock allocated by its profile; measure it again with the memory that it "
        "really needs (penstock sensitivity measure --process-mb), or submit it without a profile"
    )
