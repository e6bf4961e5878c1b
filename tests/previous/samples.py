"""One message and document of each kind: those of this release, and as a release before recorded them (`record`).

It imports only what the release before has, too.
"""

from __future__ import annotations

from penstock_profiles.node_channel import JobControl, JobStatus
from penstock_profiles.wire import (
    BatchTrial,
    Checkpointed,
    ControlMessage,
    Ended,
    Message,
    Observation,
    ProfileRequest,
    Report,
    Request,
    Result,
    Resumed,
    Started,
    Suspended,
)
from penstock_scheduler.api.agent_messages import NodeOrder, NodeStatus, OrderedGroup, OrderedJob, Taken, XidSeen
from penstock_scheduler.api.messages import JobView, OwnerView, RoundSummary
from penstock_scheduler.model import Hold, JobSpec, Outcome, Pack, Progress, SharedGpus, Stop, StopCode
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.store.rounds import OutcomeLine

BODIES = (
    Started(gpu_type="t4", gpu_ids={"n1": (0,)}),
    Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=4, step_time_s=0.1, progress=1.0),
    BatchTrial(atomic_batch=4),
    Checkpointed(progress=1.0, seconds=0.1),
    Suspended(moved_bytes=1, left_bytes=0, seconds=0.1),
    Resumed(seconds=0.1),
    Result(metric=1.0, progress=1.0),
    Ended(outcome="completed", progress=1.0),
)

GROUP = OrderedGroup(shared=SharedGpus(node="n1", gpus=1, packs=(Pack(("7",)),)), devices=(0,), gpu_type="t4")

MESSAGES: tuple[Message, ...] = (
    *(Report(job_id="7", epoch=1, sequence=number, time_s=1.0, body=body) for number, body in enumerate(BODIES)),
    ControlMessage(job_id="7", epoch=1, round=2, request=Request(id="r", asked_s=1.0)),
    ProfileRequest(gpu_type="t4", seconds=1.0),
    JobControl(number=1),
    JobStatus(pid=1, time_s=1.0),
    NodeOrder(
        node="n1", number=1, written_s=1.0, groups=(GROUP,), jobs=(OrderedJob(job="7", slurm_job=7, uid=1, gpus=1),)
    ),
    NodeStatus(node="n1", order=1, time_s=1.0, history="h", xids=(XidSeen(number=1, time_s=1.0, device=0, xid=31),)),
    Taken(history="h"),
)

JOB = JobView(id="7", version=1, name="train", user="ada", state="running", submit_s=1.0, spec=JobSpec(max_gpus=2))

OUTCOME = Outcome(Hold("7", 1), Progress.DONE, "", Stop(StopCode.ASKED, "an admin asked"))

DOCUMENTS = (JobView, OwnerView, RoundSummary, OutcomeLine, RoundRecord)
"""What the store holds as JSON."""
