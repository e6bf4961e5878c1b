"""What to tell of a job's end that Penstock had a part in."""

from __future__ import annotations

from penstock_slurm.gateway import SlurmJob


def outgrown(job: SlurmJob, memory_mb: int | None) -> str:
    """Of a job that ended because it outgrew the memory that it was given: that it did, and what helps. Else empty.

    Where cgroups keep jobs within their memory Slurm says so. With JobAcctGatherParams=OverMemoryKill, Slurm 22.05 only
    kills: state FAILED, signal 9, reason JobLaunchFailure.

    Args:
        job: as Slurm knows it after its end.
        memory_mb: what Penstock gave it on a node; None: as much as its user asked for.
    """
    if job.state == "OUT_OF_MEMORY":
        how = "ended because it outgrew"
    elif job.state == "FAILED" and (job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal:9")):
        how = "was killed, and if its output says that it exceeded a memory limit, then it outgrew"
    else:
        return ""
    if memory_mb is None:
        return ""
    return (
        f"{how} the {memory_mb} MB on a node that Penstock gave it by its profile; measure it again with the memory that it "
        "really needs (penstock sensitivity measure --process-mb), or submit it without a profile for its GPUs' part of a node"
    )
