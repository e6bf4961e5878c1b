"""The part of the API's client with which operators and admins steer penstockd."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from penstock_scheduler.api.access_messages import AuditLine, AuditPage, NewToken, TokenOrder
from penstock_scheduler.api.health_messages import ImagesAccepted, LeaderMove, StoreAdopted
from penstock_scheduler.api.messages import MAX_PAGE, ApprovalView, CloudResumed, Drain, DrainOrder, Pause, RunForgotten
from penstock_scheduler.api.whatif_messages import WhatIfOrder, WhatIfTask
from penstock_scheduler.model.policy_choice import PolicyChoice

if TYPE_CHECKING:  # it imports NumPy, and few commands are about models
    from penstock_scheduler.api.model_messages import KindList, KindView, Taught

Answer = TypeVar("Answer", bound=BaseModel)


class AdminCalls(abc.ABC):
    """What changes how penstockd decides and who may ask it, and the audit log. For admins; drains and the log for operators."""

    @abc.abstractmethod
    def _ask(
        self,
        model: type[Answer],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        query: Mapping[str, Any] | None = None,
        again: bool = False,
    ) -> Answer: ...

    def set_policy(self, choice: PolicyChoice) -> PolicyChoice:
        """Choose the policy that decides from the next round on. For admins. Returns the choice with all settings."""
        return self._ask(PolicyChoice, "PUT", "/v1/policy", body=choice)

    def approve(self, number: int) -> ApprovalView:
        """Let plans stop the jobs that the refused plan of a round would have stopped. For admins."""
        return self._ask(ApprovalView, "POST", f"/v1/rounds/{number}/approval")

    def pause(self, *, paused: bool) -> Pause:
        """Pause or resume the rounds. Running jobs keep running. For admins."""
        return self._ask(Pause, "PUT", "/v1/pause", body=Pause(paused=paused))

    def resume_cloud(self) -> CloudResumed:
        """End protected mode, so that the cloud may launch again. For admins."""
        return self._ask(CloudResumed, "POST", "/v1/cloud/resume")

    def adopt_cloud(self) -> StoreAdopted:
        """Make penstockd's store its cluster's own. The other cluster must be gone. For admins."""
        return self._ask(StoreAdopted, "POST", "/v1/cloud/adopt")

    def accept_images(self) -> ImagesAccepted:
        """Launch from the images that the settings' parameters name now. For admins."""
        return self._ask(ImagesAccepted, "POST", "/v1/cloud/images")

    def forget_cloud_run(self, run: str) -> RunForgotten:
        """Close a run in the cloud whose record cannot be read. For admins."""
        return self._ask(RunForgotten, "POST", f"/v1/cloud/runs/{run}/forget")

    def models(self) -> KindList:
        """The kinds of jobs from which new jobs learn, without what they have shown. For operators."""
        from penstock_scheduler.api.model_messages import KindList

        return self._ask(KindList, "GET", "/v1/models", again=True)

    def model_of(self, kind: str) -> KindView:
        """A kind of jobs, with what it has shown. For operators."""
        from penstock_scheduler.api.model_messages import KindView

        return self._ask(KindView, "GET", "/v1/models/kind", query={"kind": kind}, again=True)

    def forget_model(self, kind: str) -> KindView:
        """Let ended jobs of this kind teach no more. For admins."""
        from penstock_scheduler.api.model_messages import KindOrder, KindView

        return self._ask(KindView, "POST", "/v1/models/forget", body=KindOrder(kind=kind))

    def import_models(self, kinds: Sequence[Taught]) -> list[str]:
        """Import what another site has learned. Returns the kinds. For admins."""
        from penstock_scheduler.api.model_messages import KindImport, KindsImported

        return self._ask(KindsImported, "POST", "/v1/models/import", body=KindImport(kinds=list(kinds))).kinds

    def drain(self, order: DrainOrder) -> Drain:
        """Drain a node, a GPU type or a partition for adaptive jobs. For operators."""
        return self._ask(Drain, "POST", "/v1/drains", body=order, again=True)

    def move_leader(self, to: str = "") -> str:
        """Let another penstockd lead: the one of this name, or any. Returns who may lead next. For admins."""
        return self._ask(LeaderMove, "POST", "/v1/leader/move", body=LeaderMove(to=to)).to

    def create_token(self, order: TokenOrder) -> NewToken:
        """Create a token. For admins."""
        return self._ask(NewToken, "POST", "/v1/tokens", body=order)

    def audit(
        self,
        *,
        from_s: float | None = None,
        to_s: float | None = None,
        user: str | None = None,
        action: str | None = None,
        job: str | None = None,
        refused: bool = False,
        limit: int | None = None,
    ) -> Iterator[AuditLine]:
        """The audit log, newest first, page by page. For operators. The options of `penstock audit` explain the arguments.

        Times are s since 1970. `limit`: most lines; None: all.
        """
        query: dict[str, Any] = {"from": from_s, "to": to_s, "user": user, "action": action, "job": job}
        query |= {"refused": refused or None, "before": None}
        left = limit
        while left is None or left > 0:
            query["limit"] = MAX_PAGE if left is None else min(left, MAX_PAGE)
            page = self._ask(AuditPage, "GET", "/v1/audit", query=query, again=True)
            yield from page.lines
            if page.next is None:
                return
            query["before"], left = page.next, None if left is None else left - len(page.lines)

    def whatif(self, order: WhatIfOrder) -> WhatIfTask:
        """Begin a replay. penstockd runs one at a time."""
        return self._ask(WhatIfTask, "POST", "/v1/whatif", body=order)

    def whatif_task(self, task: str) -> WhatIfTask:
        """A replay, with its result when it is done."""
        return self._ask(WhatIfTask, "GET", f"/v1/whatif/{task}", again=True)

    def end_whatif(self, task: str) -> WhatIfTask:
        """Cancel a replay, or forget one that has ended."""
        return self._ask(WhatIfTask, "DELETE", f"/v1/whatif/{task}")
