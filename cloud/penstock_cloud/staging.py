"""The staging bucket: the objects in S3 through which a detached run and its site exchange files.

Each run has a few objects, `SITE/RUN/WHAT`. The instance and the user's cloud runner have no AWS key: they get links that are
signed for one object, one verb and a limited time. The objects and their writers:

====================  ============  ============================================================================
`input`               cloud runner  archive of the script, its environment and its input files
`started`             instance      the instance has unpacked the input and starts the script
`tail`                instance      newest part of the script's output, with the position of its first byte
`stop`                both          request to the script to save and end
`log`                 instance      complete output of the script
`output`              instance      archive of the output files
`result`, `stopped`   instance      exit status of the script, written last: it ended by itself, or was ended
`fetched`             cloud runner  everything was fetched
`joinedN`             instance      node N of several has unpacked the input: its address. The script starts when all have
`logN`, `outputN`     instance      as `log` and `output`, of another node than the first
`endedN`              instance      exit status of the script there, written last
====================  ============  ============================================================================

`SITE/alive` is the daemon's sign of life: its time, s since 1970.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from penstock_cloud.failures import ask, understood
from penstock_cloud.settings import CloudSettings

MOST_NODES = 8
"""Most instances of a run."""

Rights = Mapping[str, tuple[str, ...]]
"""Verb of S3 -> objects of a run that may be used by it."""


def of_cloud_runner(nodes: int = 1) -> Rights:
    """What the cloud runner of a run on so many nodes may do."""
    outputs = tuple(f"output{number}" for number in range(1, nodes))
    return {
        "get_object": ("tail", "log", "output", "result", "stopped", *outputs),
        "put_object": ("input", "stop", "fetched"),
    }


def of_instance(nodes: int = 1) -> Rights:
    """What an instance of a run on so many nodes may do. All of them have the same links."""
    get: tuple[str, ...] = ("input", "stop")
    put: tuple[str, ...] = ("started", "tail", "log", "output", "result", "stopped")
    if nodes > 1:
        joined = tuple(f"joined{number}" for number in range(nodes))
        told = tuple(f"{what}{number}" for what in ("log", "ended") for number in range(1, nodes))
        get += (*joined, *told, "result", "stopped")
        put += (*joined, *told, *(f"output{number}" for number in range(1, nodes)), "stop")
    return {"get_object": get, "put_object": put}


OBJECTS = tuple(
    sorted({name for each in (of_cloud_runner, of_instance) for names in each(MOST_NODES).values() for name in names})
)
"""All objects that a run may have."""

LONGEST_S = 7 * 86400
"""AWS signs links for at most a week."""


def connect(settings: CloudSettings) -> Any:
    """A client of S3 that answers or fails within seconds."""
    import boto3
    from botocore.config import Config

    # A link must name the region, because uploads do not follow redirections. Another endpoint than AWS's has no name for each
    # bucket.
    style = {"addressing_style": "path" if "AWS_ENDPOINT_URL_S3" in os.environ else "virtual"}
    config = Config(
        connect_timeout=3,
        read_timeout=20,
        retries={"total_max_attempts": 1},
        signature_version="s3v4",
        s3=style,
        request_checksum_calculation="when_required",  # clients of a link send none
    )
    session = boto3.session.Session(region_name=settings.region)
    return session.client("s3", config=config)


class StagingBucket:
    """The site's part of a bucket. Every method raises LaunchFailed."""

    def __init__(self, s3: Any, bucket: str, site: str) -> None:
        self._s3, self._bucket, self._site = s3, bucket, site

    def links(self, run: str, rights: Rights, seconds: float) -> dict[str, str]:
        """`get_WHAT` and `put_WHAT` -> a link that allows this for `seconds`."""
        return {
            f"{verb.removesuffix('_object')}_{what}": self.link(verb, f"{run}/{what}", seconds)
            for verb, names in rights.items()
            for what in names
        }

    def alive_link(self, seconds: float) -> str:
        """A link to the daemon's sign of life."""
        return self.link("get_object", "alive", seconds)

    def link(self, verb: str, what: str, seconds: float) -> str:
        """A signed link to one object, for one verb of S3 (`get_object` or `put_object`)."""
        from botocore.exceptions import BotoCoreError

        where = {"Bucket": self._bucket, "Key": f"{self._site}/{what}"}
        try:
            return str(self._s3.generate_presigned_url(verb, Params=where, ExpiresIn=int(min(seconds, LONGEST_S))))
        except BotoCoreError as error:
            raise understood(error) from error

    def say_alive(self, now_s: float) -> None:
        """Tell all instances that the daemon is alive."""
        self.put("alive", f"{now_s:.0f}\n".encode())

    def stop(self, run: str) -> None:
        """Ask the run to save and end."""
        self.put(f"{run}/stop", b"stop\n")

    def has(self, run: str, what: str) -> bool:
        """Whether an object of the run exists."""
        key = f"{self._site}/{run}/{what}"
        found = self._ask("list_objects_v2", Prefix=key, MaxKeys=1)
        return any(each["Key"] == key for each in found.get("Contents", []))

    def where(self, run: str) -> str:
        """The prefix of the run's objects, as `aws s3` takes it."""
        return f"s3://{self._bucket}/{self._site}/{run}/"

    def clear(self, run: str) -> None:
        """Delete all objects of a run."""
        keys = [{"Key": f"{self._site}/{run}/{what}"} for what in OBJECTS]
        self._ask("delete_objects", Delete={"Objects": keys, "Quiet": True})

    def put(self, what: str, content: bytes) -> None:
        """Write an object."""
        self._ask("put_object", Key=f"{self._site}/{what}", Body=content)

    def _ask(self, method: str, **asked: Any) -> Any:
        return ask(getattr(self._s3, method), Bucket=self._bucket, **asked)
