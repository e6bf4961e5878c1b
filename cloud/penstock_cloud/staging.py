"""What a detached run and its site leave for each other in S3, where no network joins them.

Each run has a few objects, `NAME/RUN/WHAT`, and whoever needs one gets a link to it that is signed for that one object, that one
verb, and a time: neither the instance nor the user's cloud runner on the gateway has a key of AWS's. Objects, and who
writes them:

====================  =========  ==============================================================================
`input`               cloud runner    archive of the script, its environment and the files that go along
`started`             instance   it has unpacked the input and begins
`tail`                instance   the newest part of what the script prints, with the byte that it begins at
`stop`                either     the script shall save and end
`log`                 instance   all that the script has printed
`output`              instance   archive of what is to come back
`result`, `stopped`   instance   the script's exit status, the last that is written: it has ended by itself, or been ended
`fetched`             cloud runner    all that comes back is back
====================  =========  ==============================================================================

`NAME/alive` is the daemon's sign of life, its time in s since 1970.
"""

from __future__ import annotations

from typing import Any

from penstock_cloud.failures import understood
from penstock_cloud.settings import CloudSettings

CLOUD_RUNNER = {
    "get_object": ("tail", "log", "output", "result", "stopped"),
    "put_object": ("input", "stop", "fetched"),
}
"""What a cloud runner may do with which objects of its run."""

INSTANCE = {
    "get_object": ("input", "stop"),
    "put_object": ("started", "tail", "log", "output", "result", "stopped"),
}
"""What an instance may do with which objects of its run."""

OBJECTS = tuple(sorted({name for who in (CLOUD_RUNNER, INSTANCE) for names in who.values() for name in names}))

LONGEST_S = 7 * 86400
"""AWS signs links for a week at most."""


def connect(settings: CloudSettings) -> Any:
    """A client of S3 that answers or fails within seconds."""
    import boto3
    from botocore.config import Config

    # A link must name the region itself: a redirection would not take the upload along.
    style = {"addressing_style": "path" if settings.s3_endpoint else "virtual"}
    config = Config(
        connect_timeout=3,
        read_timeout=20,
        retries={"total_max_attempts": 1},
        signature_version="s3v4",
        s3=style,
        request_checksum_calculation="when_required",  # a link's bearer has none
    )
    session = boto3.session.Session(region_name=settings.region)
    return session.client("s3", endpoint_url=settings.s3_endpoint, config=config)


class StagingBucket:
    """The site's part of a bucket. Every method raises LaunchFailed."""

    def __init__(self, s3: Any, bucket: str, name: str) -> None:
        self._s3, self._bucket, self._name = s3, bucket, name

    def links(self, run: str, rights: dict[str, tuple[str, ...]], seconds: float) -> dict[str, str]:
        """`get_WHAT` and `put_WHAT` -> a link that lets its bearer do so for so long."""
        return {
            f"{verb.removesuffix('_object')}_{what}": self._link(verb, f"{run}/{what}", seconds)
            for verb, names in rights.items()
            for what in names
        }

    def alive_link(self, seconds: float) -> str:
        """A link to the daemon's sign of life."""
        return self._link("get_object", "alive", seconds)

    def _link(self, verb: str, what: str, seconds: float) -> str:
        from botocore.exceptions import BotoCoreError

        where = {"Bucket": self._bucket, "Key": f"{self._name}/{what}"}
        try:
            return str(self._s3.generate_presigned_url(verb, Params=where, ExpiresIn=int(min(seconds, LONGEST_S))))
        except BotoCoreError as error:
            raise understood(error) from error

    def say_alive(self, now_s: float) -> None:
        """Tell all instances that the daemon lives."""
        self._put("alive", f"{now_s:.0f}\n".encode())

    def stop(self, run: str) -> None:
        """Ask the run to save and end."""
        self._put(f"{run}/stop", b"stop\n")

    def has(self, run: str, what: str) -> bool:
        """Whether an object of the run is there."""
        key = f"{self._name}/{run}/{what}"
        found = self._ask("list_objects_v2", Prefix=key, MaxKeys=1)
        return any(each["Key"] == key for each in found.get("Contents", []))

    def where(self, run: str) -> str:
        """The run's objects, as people and `aws s3` call them."""
        return f"s3://{self._bucket}/{self._name}/{run}/"

    def clear(self, run: str) -> None:
        """Delete all of a run."""
        keys = [{"Key": f"{self._name}/{run}/{what}"} for what in OBJECTS]
        self._ask("delete_objects", Delete={"Objects": keys, "Quiet": True})

    def _put(self, what: str, content: bytes) -> None:
        self._ask("put_object", Key=f"{self._name}/{what}", Body=content)

    def _ask(self, method: str, **asked: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._s3, method)(Bucket=self._bucket, **asked)
        except (BotoCoreError, ClientError) as error:
            raise understood(error) from error
