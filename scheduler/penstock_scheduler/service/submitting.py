"""Submits jobs for users.

A submission with a key is one job, however often it is sent and whenever the daemon dies. An owner, such as a task of Airflow,
has at most one job that has not ended, however many submissions with different keys it sends.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from penstock_scheduler.errors import BadJobSpec
from penstock_scheduler.messages import JobView, Owner, OwnerView, Submission
from penstock_scheduler.service.api import Call
from penstock_scheduler.service.errors import Refusal

Answer = TypeVar("Answer")


async def submit(call: Call, order: Submission) -> tuple[JobView, bool]:
    """Submit a job as the caller.

    Returns:
        The job, and whether this request submitted it. It did not if the job of the same key was there already.

    Raises:
        Refusal: the cluster takes no such job, or the caller may submit none now.
        BadJobSpec: the job spec cannot be met by any cluster.
    """
    if call.identity.uid is None:
        text = f"the daemon's host has no user {call.identity.user}, so that no job can run as this user"
        raise Refusal(403, "not-allowed", text)
    call.api.check_spec(order.spec)
    if order.owner is not None:
        return await _submit_for(call, order, order.owner)
    return await _submit(call, order)


async def _submit_for(call: Call, order: Submission, owner: Owner) -> tuple[JobView, bool]:
    """The owner's job of this generation, or a new one, which waits until a job of another generation is cancelled and has ended.

    Raises:
        Refusal: 409, a later try has submitted before.
    """
    api, user = call.api, call.identity.user
    async with api.owning.setdefault((user, owner.name), asyncio.Lock()):
        former, after = await asyncio.to_thread(api.store.owner, user, owner.name), None
        if former is not None:
            same = former.generation == owner.generation
            if owner.attempt < former.attempt or (owner.attempt == former.attempt and not same):
                text = (
                    f"job {former.job} of a later try has taken the place of this try's job; this try submits nothing"
                )
                raise Refusal(409, "superseded", text)
            view = await asyncio.to_thread(api.board.job, former.job)
            is_open = view is not None and view.state != "ended"
            if view is not None and same and (is_open or view.ended == "COMPLETED"):
                await _own(call, owner, view)
                return view, False
            if is_open:
                await call.audit(allowed=True, text=f"{former.job} is cancelled for a later try of its owner")
                await ask_cluster(api.submitter.cancel, former.job)
                after = former.job
        view, is_new = await _submit(call, order, after)
        await _own(call, owner, view)
        return view, is_new


async def _own(call: Call, owner: Owner, view: JobView) -> None:
    owned = OwnerView(**owner.model_dump(), job=view.id)
    await asyncio.to_thread(call.api.store.save_owner, call.identity.user, owned)


async def _submit(call: Call, order: Submission, after: str | None = None) -> tuple[JobView, bool]:
    """The job of the order's key, or a new one, which waits in Slurm until the job `after` has ended."""
    api, identity = call.api, call.identity
    submitter = api.submitter
    waits = [order.dependency or "", f"afterany:{after}" if after else ""]
    given = order.model_copy(update={"dependency": ",".join(filter(None, waits)) or None})
    if order.key is None:
        _throttle(call)
        job = await ask_cluster(submitter.submit, given, identity.user, identity.uid)
    else:
        lock = api.submitting.setdefault((identity.user, order.key), asyncio.Lock())
        async with lock:
            if (known := await _known(call, order, order.key)) is not None:
                return await _first_view(call, known, order), False
            try:
                _throttle(call)
                job = await ask_cluster(submitter.submit, given, identity.user, identity.uid)
            except (BadJobSpec, Refusal):
                await asyncio.to_thread(api.store.end_submission, identity.user, order.key, None)
                raise
            await asyncio.to_thread(api.store.end_submission, identity.user, order.key, job)
        api.submitting.pop((identity.user, order.key), None)
    await call.audit(allowed=True, text=job)
    return await _first_view(call, job, order), True


async def ask_cluster(question: Callable[..., Answer], *arguments: Any) -> Answer:
    """What the cluster answers. Raises Refusal 422 if it refuses."""
    try:
        return await asyncio.to_thread(question, *arguments)
    except BadJobSpec as error:
        raise Refusal(422, "refused", str(error)) from None


async def _known(call: Call, order: Submission, key: str) -> str | None:
    """The job that was submitted with this key before; None: there is none, and the key is noted in the store now."""
    api, user = call.api, call.identity.user
    digest = hashlib.sha256(order.model_dump_json().encode()).hexdigest()
    noted, job = await asyncio.to_thread(api.store.begin_submission, user, key, digest)
    if noted != digest:
        raise Refusal(409, "key-used", f"key {key} was used for another submission; choose a new key")
    if job is None:
        # No request was answered, but a daemon that died in between may have submitted the job.
        job = await asyncio.to_thread(api.submitter.find, user, key)
        if job is not None:
            await call.audit(allowed=True, text=f"{job}, submitted before")
            await asyncio.to_thread(api.store.end_submission, user, key, job)
    return job


def _throttle(call: Call) -> None:
    if (pause_s := call.api.submissions.take(call.identity.user)) > 0:
        limit = f"{call.api.settings.submissions_per_hour} submissions per hour"
        raise Refusal(429, "too-many", f"you sent more than {limit}; wait and try again", retry_after_s=pause_s)


async def _first_view(call: Call, job: str, order: Submission) -> JobView:
    """The job as the board or the store knows it; before a round has seen it, as it was submitted."""
    board = call.api.board
    view = await asyncio.to_thread(board.job, job)
    if view is None or (view.key is None and order.key is not None):
        view = view or JobView(
            id=job,
            version=0,
            name=order.name or "",
            user=call.identity.user,
            account=order.account or "",
            state="queued",
            submit_s=time.time(),
            spec=order.spec,
        )
        view = view.model_copy(update={"key": order.key})
        await asyncio.to_thread(board.adopt, view)
    return view
