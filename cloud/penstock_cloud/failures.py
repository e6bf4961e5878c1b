"""The meaning of EC2's errors: each error code has a kind, and each kind has its own reaction.

The codes are from AWS, "Error codes for the Amazon EC2 API". A code that is not in the table counts as throttling if EC2 itself
failed (status 500 and above), and otherwise as an error for the admin, since stopping is cheaper than guessing.
"""

from __future__ import annotations

from typing import Any

from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed

KINDS: dict[str, Kind] = {
    "InsufficientInstanceCapacity": Kind.CAPACITY,
    "InsufficientHostCapacity": Kind.CAPACITY,
    "InsufficientReservedInstanceCapacity": Kind.CAPACITY,
    "InsufficientCapacity": Kind.CAPACITY,
    "ReservationCapacityExceeded": Kind.CAPACITY,
    "InsufficientFreeAddressesInSubnet": Kind.CAPACITY,
    "SpotMaxPriceTooLow": Kind.CAPACITY,
    "UnfulfillableCapacity": Kind.CAPACITY,
    "Unsupported": Kind.CAPACITY,  # this type is not offered in this zone
    "VcpuLimitExceeded": Kind.QUOTA,
    "InstanceLimitExceeded": Kind.QUOTA,
    "MaxSpotInstanceCountExceeded": Kind.QUOTA,
    "MaxSpotFleetRequestCountExceeded": Kind.QUOTA,
    "SpotInstanceCountLimitExceeded": Kind.QUOTA,
    "VolumeLimitExceeded": Kind.QUOTA,
    "RequestLimitExceeded": Kind.THROTTLED,
    "RequestResourceCountExceeded": Kind.THROTTLED,
    "Throttling": Kind.THROTTLED,
    "ThrottlingException": Kind.THROTTLED,
    "EC2ThrottledException": Kind.THROTTLED,
    "TooManyRequestsException": Kind.THROTTLED,
    "Unavailable": Kind.THROTTLED,
    "ServiceUnavailable": Kind.THROTTLED,
    "InternalError": Kind.THROTTLED,
    "InternalFailure": Kind.THROTTLED,
    # Of a session's credentials, which boto3 renews, or of a clock that is set right: the request itself may be good.
    "ExpiredToken": Kind.THROTTLED,
    "ExpiredTokenException": Kind.THROTTLED,
    "RequestExpired": Kind.THROTTLED,
    "RequestTimeTooSkewed": Kind.THROTTLED,
}

NOT_IN_ZONE = "not supported in your requested Availability Zone"
"""Part of EC2's message if a zone does not offer a type: the error code of a fleet does not tell that."""


def refusal(code: str, words: str, status: int = 400) -> LaunchFailed:
    """The error for one of EC2's error codes."""
    if code == "InvalidFleetConfiguration" and NOT_IN_ZONE in words:
        return LaunchFailed(Kind.CAPACITY, code, words)
    kind = KINDS.get(code, Kind.THROTTLED if status >= 500 else Kind.CONFIG)
    return LaunchFailed(kind, code, words)


def understood(error: Any) -> LaunchFailed:
    """The error for a ClientError or BotoCoreError of boto3."""
    response = getattr(error, "response", None)
    if response is not None:
        told = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        return refusal(told.get("Code", ""), told.get("Message", str(error)), status)
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError

    kind = Kind.LOST if isinstance(error, (HTTPClientError, NoConnection)) else Kind.CONFIG
    return LaunchFailed(kind, "", str(error))
