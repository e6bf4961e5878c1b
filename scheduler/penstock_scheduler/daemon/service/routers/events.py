"""The endpoint that streams rounds and changes of jobs to clients as they happen."""

from __future__ import annotations

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from penstock_scheduler.daemon.service.api import User
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.stream import Answer, Position, Stream

router = APIRouter(prefix="/v1")


@router.get("/events", response_class=StreamingResponse)
async def events(
    call: User,
    last_event_id: str | None = Header(default=None, max_length=100, description="Go on after this event."),
) -> StreamingResponse:
    """Stream events as server-sent events: `round` for each round, `job` for each change of a job that you may see.

    The stream begins with all jobs that have not ended, as events `snapshot`. With the header `Last-Event-ID`, it goes on after
    that event instead. A job has at most one event a second.
    """
    places, user = call.api.listening, call.identity.user
    if not places.take(user):
        text = f"{places.held(user)} of your requests listen already, and others need the rest; close some, or try again later"
        raise Refusal(503, "busy", text, retry_after_s=60)
    stream = Stream(call.api.known, None if call.sees_all else user, Position.read(last_event_id))

    def end() -> None:
        stream.close()
        places.give_back(user)

    return Answer(stream.messages(), end)
