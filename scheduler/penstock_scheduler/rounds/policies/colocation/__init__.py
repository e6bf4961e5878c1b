"""Stages that let waiting jobs join jobs that already have GPUs: `gandiva-share` and `antman-share`.

A stage refines the plan of the policy in front of it. That policy decides only about *resident* jobs, which have GPUs
of their own; to it, *joining* jobs wait (`roles.residents_only`). The stage then places joining jobs on GPUs of
resident jobs. A resident job keeps its placement. A joining job leaves as soon as the policy wants the GPUs for another
job, or gives the joining job GPUs of its own. A job joins at most one resident job at a time, on one node.

Each stage performs these steps (`stages`), each on the `residents.Residents` that the steps before it left:

1. **Jobs in transit arrive.** A job that an earlier round sent to a resident job still goes there if the resident job
   is still there and has room. Otherwise the job waits.
2. **Recent arrivals stay.** For `pack_interval_s` after its last move, a joining job stays with its resident job as
   long as the reason for joining still holds.
3. **Opportunistic jobs use what guaranteed jobs leave** (`antman-share` only). Each waiting opportunistic job joins the
   guaranteed job with the least loaded GPUs. Each GPU has at most one joining job, whose memory is limited to what the
   resident job leaves. A job that does not answer its node's agent cannot be held to a share, so it joins no guaranteed
   job. The node then moves the joining jobs' compute share so that the resident job keeps its speed
   (`sharing.control`).
4. **Packs that pay.** Resident and joining jobs with the same number of GPUs are matched so that all of them together
   are expected to train most (`sharing.packing`). A pack ends once a slice shows that it does not pay. Under
   `antman-share`, only opportunistic jobs are packed this way.
5. **First slices** (`gandiva-share` only). A job that has never run gets one time slice at once, on the GPUs of a job
   that may be suspended and that has no higher priority. Its user gets early feedback, and the scheduler learns the
   profile that it needs to pack the job.

The policy `antman` places its opportunistic jobs with steps 1 to 4, too.
"""

from penstock_scheduler.rounds.policies.colocation.residents import gpu_class, in_transit, joining_jobs, residents_only
from penstock_scheduler.rounds.policies.colocation.stages import (
    AntmanShare,
    AntmanShareSettings,
    GandivaShare,
    GandivaShareSettings,
    with_opportunistic_jobs,
)

__all__ = [
    "AntmanShare",
    "AntmanShareSettings",
    "GandivaShare",
    "GandivaShareSettings",
    "gpu_class",
    "in_transit",
    "joining_jobs",
    "residents_only",
    "with_opportunistic_jobs",
]
