"""The meaning of EC2's errors: each error code has a kind, and each kind has its own reaction.

The codes are from AWS, "Error codes for the Amazon EC2 API". A code that neither the table nor a rule knows counts as throttling
if EC2 itself failed (status 500 and above). Otherwise it is unknown, and stops only the offer that was ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed

KINDS: dict[str, Kind] = {
    "ReservationCapacityExceeded": Kind.CAPACITY,
    "SpotMaxPriceTooLow": Kind.CAPACITY,
    "UnfulfillableCapacity": Kind.CAPACITY,
    "Unsupported": Kind.CAPACITY,  # this type is not offered in this zone
    "VolumeTypeNotAvailableInZone": Kind.CAPACITY,
    "VolumeIOPSLimit": Kind.QUOTA,
    "RequestLimitExceeded": Kind.THROTTLED,
    "BandwidthLimitExceeded": Kind.THROTTLED,
    "RequestResourceCountExceeded": Kind.THROTTLED,
    "Throttling": Kind.THROTTLED,
    "ThrottlingException": Kind.THROTTLED,
    "EC2ThrottledException": Kind.THROTTLED,
    "ThrottledException": Kind.THROTTLED,
    "RequestThrottled": Kind.THROTTLED,
    "RequestThrottledException": Kind.THROTTLED,
    "TooManyRequestsException": Kind.THROTTLED,
    "PriorRequestNotComplete": Kind.THROTTLED,
    "RequestTimeout": Kind.THROTTLED,
    "RequestTimeoutException": Kind.THROTTLED,
    "ConcurrentTagAccess": Kind.THROTTLED,
    "IncorrectState": Kind.THROTTLED,
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


ALL = (
    "AuthFailure",
    "UnauthorizedOperation",
    "AccessDenied",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
    "MissingAuthenticationToken",
    "OptInRequired",
    "Blocked",
    "PendingVerification",
    "InvalidAMIID",
    "InvalidSubnet",
    "InvalidGroup",
    "InvalidSecurityGroup",
)
"""How codes begin that concern every order of a region: the credentials, the account, and what all instances have in common."""


def refusal(code: str, words: str, status: int = 400) -> LaunchFailed:
    """The error for one of EC2's error codes."""
    return LaunchFailed(_kind(code, words, status), code, words)


def _kind(code: str, words: str, status: int) -> Kind:
    if code == "InvalidFleetConfiguration" and NOT_IN_ZONE in words:
        return Kind.CAPACITY
    if code in KINDS:
        return KINDS[code]
    if code.startswith(("Insufficient", "InvalidLaunchTemplate")):  # the next order makes a deleted template anew
        return Kind.CAPACITY
    if code.endswith(("LimitExceeded", "CountExceeded")):
        return Kind.QUOTA
    if code.startswith(ALL) or not code:
        return Kind.CONFIG
    return Kind.THROTTLED if status >= 500 else Kind.UNKNOWN


def ask(call: Callable[..., Any], **asked: Any) -> Any:
    """The answer of one of boto3's calls.

    Raises LaunchFailed, also for an answer that is not AWS's own, such as the page of a proxy on the way. Such an answer
    counts as lost, since the call may have reached AWS.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        answer = call(**asked)
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        raise understood(error) from error
    if "RequestId" not in answer["ResponseMetadata"]:
        raise LaunchFailed(
            Kind.LOST, "", "the answer is not AWS's own: it names no request; is there a proxy on the way?"
        )
    return answer


def pages(call: Callable[..., Any], **asked: Any) -> Iterator[Any]:
    """The pages of the answer, as AWS numbers them with NextToken. Raises LaunchFailed."""
    while True:
        page = ask(call, **asked)
        yield page
        if not page.get("NextToken"):
            return
        asked["NextToken"] = page["NextToken"]


def understood(error: Any) -> LaunchFailed:
    """The error for a ClientError, BotoCoreError or ResponseParserError of boto3."""
    response = getattr(error, "response", None)
    if response is not None:
        told = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        return refusal(told.get("Code", ""), told.get("Message", str(error)), status)
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError
    from botocore.parsers import ResponseParserError

    kind = Kind.LOST if isinstance(error, (HTTPClientError, NoConnection, ResponseParserError)) else Kind.CONFIG
    return LaunchFailed(kind, "", str(error))
