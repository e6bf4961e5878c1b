"""Submits jobs for users.

A submission with a key is one job, however often it is sent and whenever the daemon dies. An owner, such as a task of Airflow,
has at most one job that has not ended, however many submissions with different keys it sends.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from penstock_scheduler.api.messages import JobView, Owner, OwnerView, Submission
from penstock_scheduler.daemon.service.api import Api, Call
from penstock_scheduler.daemon.service.board import has_other_key, is_former
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.store.leadership.site_clock import site_time_s

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
    call.api.here.check_spec(order.spec)
    if order.owner is not None:
        return await _submit_for(call, order, order.owner)
    return await _submit(call, order)


async def _submit_for(call: Call, order: Submission, owner: Owner) -> tuple[JobView, bool]:
    """The owner's job of this generation, or a new one, which waits until a job of another generation is cancelled and has ended.

    Raises:
        Refusal: 409, a later try has submitted before, somebody has cancelled the job, or its history is deleted.
    """
    api, user = call.api, call.identity.user
    async with api.owning.setdefault((user, owner.name), asyncio.Lock()):
        newest, after, view = await asyncio.to_thread(api.store.owner, user, owner.name), None, None
        if newest is not None:
            same = newest.generation == owner.generation
            if owner.attempt < newest.attempt or (owner.attempt == newest.attempt and not same):
                text = (
                    f"{_the_job(newest)} of a later try has taken the place of this try's job; this try submits nothing"
                )
                raise Refusal(409, "superseded", text)
            view, same = await _job_of(call, order, newest, same=same)
            if same and (its := _still_serves(newest, view)) is not None:
                await _own(call, OwnerView(**owner.model_dump(), job=its.id, key=newest.key))
                return its, False
        _throttle(call, api.submissions.pause_s(user))  # before the former job is cancelled in vain
        if view is not None and view.state != "ended":
            await call.audit(allowed=True, text="is cancelled for a later try of its owner", target=f"jobs/{view.id}")
            await call.expect_owner(view)
            await cancel(api, view.id, user)
            api.board.endings[view.id] = f"was cancelled because its owner {owner.name} submitted a job in its place"
            after = view.id
        # Noted before the submission: if penstockd stops in between, the next try, which has another key, finds the job.
        noted = OwnerView(**owner.model_dump(), key=order.key, former=after)
        await _own(call, noted)
        view, is_new = await _submit(call, order, after)
        await _own(call, noted.model_copy(update={"job": view.id}))
        return view, is_new


def _still_serves(newest: OwnerView, view: JobView | None) -> JobView | None:
    """The job of an earlier try of the same generation, if it serves a later try, too: it is completed or goes on.

    Raises:
        Refusal: 409, somebody has cancelled the job, or its history is deleted.
    """
    if view is None:
        if newest.job is None:
            return None
        text = (
            f"the history of {_the_job(newest)}, the job of an earlier try, is deleted, so that it is unknown whether "
            "it completed; clear the task, or submit with another generation, to run it anew"
        )
        raise Refusal(409, "forgotten", text)
    if view.ended == "CANCELLED" and not newest.given_up:
        why = f": it {view.ended_text}" if view.ended_text else ""
        text = (
            f"{_the_job(newest)}, the job of an earlier try, was cancelled{why}; a try of the same generation does not "
            "start again what somebody stopped. Clear the task, or submit with another generation, to run it anew"
        )
        raise Refusal(409, "cancelled", text)
    goes_on = view.state != "ended" and not newest.given_up
    return view if view.ended == "COMPLETED" or goes_on else None


async def _job_of(call: Call, order: Submission, newest: OwnerView, *, same: bool) -> tuple[JobView | None, bool]:
    """The job of an owner's newest try, and whether it is of the order's generation, given whether the try is.

    If penstockd stopped while the try was submitted, and the try has no job, it is the job that the try was to replace.
    """
    api, user = call.api, call.identity.user
    if newest.job is not None:
        view = await asyncio.to_thread(api.board.job, newest.job)
        return (None if view is not None and has_other_key(view, newest.key) else view), same
    if newest.key is not None:
        job = await asyncio.to_thread(api.store.submission, user, newest.key)
        found = job is None
        job = job or await api.cluster.call(user, api.submitter.find, user, newest.key)
        if job is not None:
            return await _first_view(call, job, order.model_copy(update={"key": newest.key}), found=found), same
    return (None if newest.former is None else await asyncio.to_thread(api.board.job, newest.former)), False


def _the_job(newest: OwnerView) -> str:
    return "the job" if newest.job is None else f"job {newest.job}"


async def _own(call: Call, owner: OwnerView) -> None:
    await asyncio.to_thread(call.api.store.save_owner, call.identity.user, owner)
    if call.api.leases is not None:
        call.api.leases.begin(call.identity.user, owner)


async def cancel(api: Api, job: str, user: str, *, admin: bool = False) -> None:
    """Cancel a job as this user, or as penstockd for an admin.

    If it has an owner, later tries of the same generation submit no other job in its place.
    """
    await ask_cluster(api, user, api.submitter.cancel, job, None if admin else user)


async def give_up(api: Api, job: str, owner: tuple[str, str], over: Callable[[], bool] = lambda: True) -> bool:
    """Cancel a job for its owner (user, name), whose next try then submits another one.

    Returns:
        Whether the job is cancelled. It is not if it is not `over`, which is asked under the lock of the owner's submissions.
    """
    async with api.owning.setdefault(owner, asyncio.Lock()):
        if not over():
            return False
        # Noted before the request: if penstockd stops in between, no later try takes for somebody's what the owner did.
        newest = await asyncio.to_thread(api.store.owner, *owner)
        if newest is not None and newest.job == job:
            await asyncio.to_thread(api.store.save_owner, owner[0], newest.model_copy(update={"given_up": True}))
        await cancel(api, job, owner[0])
        return True


async def _submit(call: Call, order: Submission, after: str | None = None) -> tuple[JobView, bool]:
    """The job of the order's key, or a new one, which waits in Slurm until the job `after` has ended."""
    api, identity = call.api, call.identity
    submitter = api.submitter
    waits = [order.dependency or "", f"afterany:{after}" if after else ""]
    given = order.model_copy(update={"dependency": ",".join(filter(None, waits)) or None})
    if order.key is None:
        _throttle(call, api.submissions.take(identity.user))
        job = await ask_cluster(api, identity.user, submitter.submit, given, identity.user, identity.uid)
    else:
        lock = api.submitting.setdefault((identity.user, order.key), asyncio.Lock())
        async with lock:
            if (known := await _known(call, order, order.key)) is not None:
                return await _first_view(call, known, order), False
            try:
                _throttle(call, api.submissions.take(identity.user))
                job = await ask_cluster(api, identity.user, submitter.submit, given, identity.user, identity.uid)
            except (BadJobSpec, Refusal):
                await asyncio.to_thread(api.store.end_submission, identity.user, order.key, None)
                raise
            await asyncio.to_thread(api.store.end_submission, identity.user, order.key, job)
    await call.audit(allowed=True, target=f"jobs/{job}")
    return await _first_view(call, job, order, new=True), True


async def ask_cluster(api: Api, user: str, question: Callable[..., Answer], *arguments: Any) -> Answer:
    """What the cluster answers to a question for this user. Raises Refusal 422 if it refuses, and Busy."""
    try:
        return await api.cluster.call(user, question, *arguments)
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
        job = await api.cluster.call(user, api.submitter.find, user, key)
        if job is not None:
            await call.audit(allowed=True, text="was submitted before", target=f"jobs/{job}")
            await asyncio.to_thread(api.store.end_submission, user, key, job)
            await _first_view(call, job, order, found=True)
    return job


def _throttle(call: Call, pause_s: float) -> None:
    """Raise Refusal 429 unless the user may submit a job now."""
    if pause_s > 0:
        limit = f"{call.api.settings.submissions_per_hour} submissions per hour"
        raise Refusal(429, "too-many", f"you sent more than {limit}; wait and try again", retry_after_s=pause_s)


async def _first_view(call: Call, job: str, order: Submission, *, new: bool = False, found: bool = False) -> JobView:
    """The job as the board or the store knows it; before a round has seen it, as it was submitted.

    If it is new, or Slurm has found it by the key, what is known may be of a job that had its id before. If not, a later job may
    have its id: Slurm gives an id again after a crash, for example.

    Raises:
        Refusal: 409, another job has its id now.
    """
    board = call.api.board
    view = await asyncio.to_thread(board.job, job)
    user = call.identity.user
    another = view is not None and (view.user != user or has_other_key(view, order.key))
    former = view is not None and new and is_former(view, user, order.key, site_time_s())
    if former or (another and found):
        view = None
    elif another:
        text = f"job {job} of this key is forgotten, and another job has its id now; choose a new key"
        raise Refusal(409, "forgotten", text)
    if view is None or (view.key is None and order.key is not None):
        view = view or JobView(
            id=job,
            version=0,
            name=order.name or "",
            user=user,
            account=order.account or "",
            state="queued",
            submit_s=site_time_s(),
            spec=order.spec,
        )
        view = view.model_copy(update={"key": order.key})
        await asyncio.to_thread(board.adopt, view)
    return view
