"""What `sharing.node.Groups` asks of this node: how jobs fared, which of them cannot be suspended, and where there is
room."""

from __future__ import annotations

import math
from collections.abc import Collection

from penstock_scheduler.api.agent_messages import NumberedPack
from penstock_scheduler.model import JobId, Pack, PackSeen
from penstock_scheduler.rounds.sharing.control import Steps
from penstock_scheduler.rounds.sharing.node import Group
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.observed import steps_between
from penstock_slurm.agent.state import LocalJob, next_number

MOST_REFUSALS = 10
"""Time slices that a job keeps because it says that it is too large to move to host memory. Then it is frozen in
place."""


class AgentNodeView:
    """`sharing.node.NodeView` of a real node."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def seen(self, pack: Pack) -> PackSeen | None:
        """Rates relative to those alone, if both are known of all jobs of the pack."""
        state, jobs = self._state, self._state.jobs
        alone = [jobs[job].rate if job in jobs else 0.0 for job in pack.jobs]
        now = [state.observed(job).rate for job in pack.jobs]
        if not all(alone) or any(state.observed(job).mark is None for job in pack.jobs):
            return None
        group = state.ordered_group(pack.jobs[0])
        speeds = tuple(rate / before for rate, before in zip(now, alone, strict=True))
        seen = PackSeen(pack.jobs, group.gpu_type if group is not None else "", speeds)
        packs = state.saved.packs
        packs.append(NumberedPack(number=next_number(packs), seen=seen))
        return seen

    def steps(self, pack: Pack, group: Group) -> Steps:
        """Steps that the guaranteed job's first process counted since all jobs of the pack do what they were told."""
        assert pack.guaranteed is not None, "steps are of the guaranteed job"
        observed = self._state.observed(pack.guaranteed)
        return steps_between(observed.mark, observed.first)

    def begun_s(self, job: JobId) -> float:
        """When the job reported its first step."""
        local = self._state.jobs.get(job)
        return local.begun_s if local is not None else 0.0

    def on_s(self, job: JobId) -> float:
        """When the job last began to use its GPUs."""
        local = self._state.jobs.get(job)
        return local.resumed_s if local is not None and local.state in ("running", "suspending") else math.inf

    def off_s(self, job: JobId) -> float:
        """When the job was off its GPUs: moved off them, or frozen."""
        local = self._state.jobs.get(job)
        if local is None:
            return 0.0
        on = local.state in ("running", "suspending") or (local.state == "suspended" and not local.off)
        return math.inf if on else local.free_s

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        """MPS clients, and jobs whose state would not fit into the host memory for it. The smallest states are moved
        first."""
        jobs = self._state.jobs
        room_mb = self._state.host_mb - sum(each.moved_mb for each in jobs.values() if each.state == "suspended")
        refused = []
        for job in sorted(leaving, key=lambda job: self._state.observed(job).state_mb):
            local, observed = jobs.get(job), self._state.observed(job)
            if local is None or local.state == "suspended" or local.gone:
                continue
            if local.mps:
                refused.append(job)
                local.why = "keeps its time slice: a client of NVIDIA's MPS is not suspended"
                continue
            needs_mb = observed.state_mb
            if needs_mb <= room_mb:
                room_mb -= needs_mb
                local.refusals = 0
                continue
            if observed.used_mb is None:
                if self.must_freeze_in_place(local):
                    continue
                local.refusals += 1
            refused.append(job)
            local.why = (
                f"keeps its time slice: suspended, it would take {needs_mb:.0f} MB of host memory, and "
                f"{max(room_mb, 0):.0f} of the {self._state.host_mb} MB for that are left"
            )
        return refused

    def must_freeze_in_place(self, local: LocalJob) -> bool:
        """Whether the job has kept so many time slices as too large to move that it is no longer asked to move."""
        return local.refusals >= MOST_REFUSALS

    def pinned(self, job: JobId) -> frozenset[int]:
        """GPUs that the job holds in Slurm, has a driver's context on or, as an MPS client, cannot leave."""
        ordered = self._state.ordered_job(job)
        local = self._state.jobs.get(job)
        if ordered is None or local is None:
            return frozenset()
        if ordered.own_devices:
            return frozenset(ordered.own_devices)
        return frozenset() if local.anywhere and not local.mps else frozenset(local.devices)

    def _left_mb(self, device: int, pack: Pack) -> float:
        """Memory that jobs of other packs keep on a GPU."""
        return sum(
            each.left_mb
            for name, each in self._state.jobs.items()
            if name not in pack.jobs and device in each.devices and not each.gone
        )

    def crowded(self, pack: Pack) -> bool:
        """Whether frozen jobs hold so much of the pack's GPUs that a job of the pack does not fit."""
        found = {job: text for job in pack.jobs if (text := self.lacks_room(job))}
        for job, text in found.items():
            self._state.jobs[job].why = text
        return bool(found)

    def finds_no_room(self, group: Group) -> bool:
        """Whether jobs that left have kept so much memory that a job whose time slice it is does not fit."""
        return any(self.lacks_room(job) for pack in group.running for job in pack.jobs if job not in group.crowded)

    def lacks_room(self, job: JobId) -> str:
        """Why a job that is off its GPUs does not fit on them, as a sentence; "": it fits, or its need is unknown."""
        state = self._state
        local, pack = state.jobs.get(job), state.ordered_pack(job)
        if local is None or pack is None or local.state not in ("waiting", "suspended") or not local.memory_mb:
            return ""
        ordered = next(each for each in state.ordered_groups if pack in each.shared.packs)
        gpu_mb = state.gpu_memory_mb.get(ordered.gpu_type, math.inf)
        jobs, pinned = state.jobs.items(), self.pinned(job)
        needs_mb = sum(
            each.memory_mb for name, each in jobs if name in pack.jobs and set(each.devices) & set(local.devices)
        )
        left_mb = {device: self._left_mb(device, pack) for device in pinned or ordered.devices}
        roomy = [device for device, mb in left_mb.items() if mb + needs_mb <= gpu_mb]
        if len(roomy) == len(left_mb) or (not pinned and len(roomy) >= len(local.devices)):
            return ""
        most_mb = max(left_mb.values())
        return (
            f"waits for GPU memory: suspended jobs keep {most_mb:.0f} MB of its GPU, and it was seen to need "
            f"{needs_mb} of the {gpu_mb} MB"
        )
