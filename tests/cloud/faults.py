"""moto's server, and a thin proxy in front of it that adds what moto lacks: tokens, refusals, lost answers, prices and more.

All other requests pass through to moto unchanged, so boto3's requests and their answers are real HTTP.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.server import ThreadedMotoServer

KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
LAUNCHES = ("CreateFleet", "RunInstances")


@dataclass
class Fault:
    """A fault in the next `times` calls of `action`.

    `kind`: "error" refuses with `code`; "lost-before" closes the connection instead of asking moto; "lost-after" asks moto
    and closes it then; a name in PAGES asks moto and answers that page; "fleet" answers CreateFleet with `code` among its
    errors; "partial" launches one
    instance fewer than was asked for; "hide" leaves all instances out of an answer.
    """

    action: str
    kind: str
    code: str = ""
    times: int = 1
    words: str = "told by the test"


@dataclass
class Reserved:
    """A capacity reservation or capacity block, which moto lacks."""

    instance_type: str
    zone: str
    left: int
    block: bool = False
    end: str = ""

    def described(self, name: str) -> str:
        kind = "capacity-block" if self.block else "default"
        end = f"<endDate>{self.end}</endDate>" if self.end else ""
        return (
            f"<item><capacityReservationId>{name}</capacityReservationId><instanceType>{self.instance_type}</instanceType>"
            f"<availabilityZone>{self.zone}</availabilityZone><state>active</state><reservationType>{kind}</reservationType>"
            f"{end}</item>"
        )

    def refuses(self, asked: dict[str, str]) -> Answer | None:
        """Take one place. Returns EC2's refusal of the launch, if there is one."""
        market = asked.get("InstanceMarketOptions.MarketType", "")
        if asked["InstanceType"] != self.instance_type or market != ("capacity-block" if self.block else ""):
            return refusal("InvalidParameterCombination", "this does not fit the reservation")
        if self.left < 1:
            return refusal("ReservationCapacityExceeded", "no place is left")
        self.left -= 1
        return None


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


JSON = {"Content-Type": "application/x-amz-json-1.1", "x-amzn-RequestId": "x"}
HTML = {"Content-Type": "text/html"}
PAGES = {
    "gateway's page": Answer(502, b"<!doctype html>\n<html lang=en><title>502 Bad Gateway</title>", HTML),
    "login page": Answer(200, b"<!doctype html><html><title>Log in</title><p>You need an account<br>", HTML),
    "login page in XML": Answer(200, b"<html><body><p>You need an account</p></body></html>", HTML),
    "half an answer": Answer(200, b"<DescribeInstancesResponse><requestId>x</requestId><reservationSet><item>", HTML),
}
"""Answers that are not AWS's own, as a site's proxy or a broken connection gives them."""


class Ec2:
    """The proxy. `faults` are consumed in order; `calls` are the requested actions."""

    def __init__(self) -> None:
        os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # 1301 of them, 7 s
        self.moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.moto.start()
        self._port = self.moto.get_host_and_port()[1]
        self._direct: Any = None
        self._s3: Any = None
        self._elsewhere: dict[str, Any] = {}
        self.silent: set[str] = set()
        """Regions that answer nothing."""
        self.through: Any = None
        self.staging: Any = None
        self.faults: list[Fault] = []
        self.slow: Callable[[str], None] | None = None
        """What each call waits for before it is answered, by its action."""
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.spot: dict[tuple[str, str], float] = {}
        self.spot_changes: list[tuple[str, str, float, float]] = []
        """Type, zone, when the price on spot changed (s since 1970), and the price; each of `spot` holds long before."""
        self.on_demand: dict[str, float] = {}
        self.groups: set[str] = set()
        self.reservations: dict[str, Reserved] = {}
        self.double_launches = 0
        self.gates: dict[str, threading.Event] = {}
        """Action -> what its calls wait for before they are answered."""
        self._forgotten: list[dict[str, Any]] = []
        self._tokens: dict[str, tuple[dict[str, str], Answer]] = {}
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise each body waits 40 ms for the acknowledgement of its headers

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = proxy.answer(self.path, dict(self.headers), body)
                if answer is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # connections are closed on purpose here

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def s3_url(self) -> str:
        """moto's S3, past the proxy."""
        return f"http://127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.moto.stop()

    def direct(self) -> Any:
        """A client of moto, past the proxy. It is shared, since creating one takes half a second."""
        if self._direct is None:
            self._direct = boto3.client(
                "ec2", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{self._port}", **KEYS
            )
        return self._direct

    def direct_in(self, region: str) -> Any:
        """A client of moto in a region, past the proxy. It is shared."""
        if region == "us-east-1":
            return self.direct()
        if region not in self._elsewhere:
            url = f"http://127.0.0.1:{self._port}"
            self._elsewhere[region] = boto3.client("ec2", region_name=region, endpoint_url=url, **KEYS)
        return self._elsewhere[region]

    def client_of(self, instance: str) -> Any:
        """The client of the region in which an instance is."""
        asked = [{"Name": "instance-id", "Values": [instance]}]
        clients = (self.direct(), *self._elsewhere.values())
        return next(each for each in clients if each.describe_instances(Filters=asked)["Reservations"])

    def s3(self) -> Any:
        """A shared client of moto's S3."""
        if self._s3 is None:
            self._s3 = boto3.client("s3", region_name="us-east-1", endpoint_url=self.s3_url, **KEYS)
        return self._s3

    def reset(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("POST", "/moto-api/reset")
        connection.getresponse().read()
        connection.close()
        with self._lock:
            self.gates.clear()
            self.silent.clear()
            self.slow = None
            self.faults.clear(), self.calls.clear(), self._tokens.clear(), self.groups.clear()
            (
                self.spot_changes.clear(),
                self.spot.clear(),
                self.on_demand.clear(),
                self.reservations.clear(),
                self._forgotten.clear(),
            )
            self.double_launches = 0

    # --- answering

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        if "AWSPriceListService" in headers.get("X-Amz-Target", ""):
            if self.slow is not None:
                self.slow("GetProducts")
            return self._price(json.loads(body))
        if "GetServiceQuota" in headers.get("X-Amz-Target", ""):  # moto has no quotas of EC2
            told = json.dumps({"Quota": {"Value": 64.0, "QuotaCode": json.loads(body)["QuotaCode"]}})
            return Answer(200, told.encode(), JSON)
        asked = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        action = asked.get("Action", "")
        self.calls.append((action, asked))
        if any(f"/{region}/ec2/" in headers.get("Authorization", "") for region in self.silent):
            return None
        if self.slow is not None:
            self.slow(action)
        if (gate := self.gates.get(action)) is not None:
            gate.wait(30)
        with self._lock:
            fault = next((each for each in self.faults if each.action == action), None)
            if fault is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
            if fault is not None and fault.kind == "error":
                return refusal(fault.code, fault.words)
            if fault is not None and fault.kind == "lost-before":
                return None
            if fault is not None and fault.kind == "fleet":
                return empty_fleet(fault.code, fault.words)
            if fault is not None and fault.kind == "partial":
                total = "TargetCapacitySpecification.TotalTargetCapacity"
                body = body.replace(f"{total}={asked[total]}".encode(), f"{total}={int(asked[total]) - 1}".encode())
            answer = self._own(action, asked) or self._once(action, asked, path, headers, body)
            if fault is not None and fault.kind == "hide":
                answer = Answer(
                    answer.status,
                    re.sub(rb"<reservationSet>.*</reservationSet>", b"<reservationSet/>", answer.body, flags=re.S),
                )
            if fault is not None and fault.kind in PAGES:
                return PAGES[fault.kind]
            return None if fault is not None and fault.kind == "lost-after" else answer

    def _once(self, action: str, asked: dict[str, str], path: str, headers: dict[str, str], body: bytes) -> Answer:
        """EC2's idempotency: the same token gets the same answer, and a different request with it is refused."""
        token = asked.get("ClientToken") if action in LAUNCHES else None
        if token is not None and token in self._tokens:
            before, answer = self._tokens[token]
            if before != asked:
                self.double_launches += 1
                return refusal("IdempotentParameterMismatch", "the same token with other parameters")
            return answer
        reserved = asked.get("CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId")
        if reserved is not None and (refused := self.reservations[reserved].refuses(asked)) is not None:
            return refused
        answer = self._ask_moto(path, headers, body)
        if token is not None and answer.status == 200:
            self._tokens[token] = asked, answer
        return answer

    def _own(self, action: str, asked: dict[str, str]) -> Answer | None:
        if action == "CreatePlacementGroup":
            self.groups.add(asked["GroupName"])
            return xml(action, "<return>true</return>")
        if action == "DeletePlacementGroup":
            self.groups.discard(asked["GroupName"])
            return xml(action, "<return>true</return>")
        if action == "DescribeCapacityReservations":
            ids = {value for key, value in asked.items() if key.startswith("CapacityReservationId.")}
            if unknown := ids - set(self.reservations):
                return refusal("InvalidCapacityReservationId.NotFound", f"{unknown} do not exist")
            names = sorted(ids or self.reservations)  # one a page
            at = int(asked.get("NextToken", "0"))
            rows = "".join(self.reservations[name].described(name) for name in names[at : at + 1])
            more = f"<nextToken>{at + 1}</nextToken>" if at + 1 < len(names) else ""
            return xml(action, f"<capacityReservationSet>{rows}</capacityReservationSet>{more}")
        if action == "DescribeSpotPriceHistory":
            rows = "".join(
                f"<item><instanceType>{name}</instanceType><availabilityZone>{zone}</availabilityZone>"
                f"<spotPrice>{price}</spotPrice><productDescription>Linux/UNIX</productDescription>"
                "<timestamp>2026-11-01T00:00:00.000Z</timestamp></item>"
                for (name, zone), price in self.spot.items()
            )
            changes = [each for each in self.spot_changes if each[1] == asked.get("AvailabilityZone")]
            rows += "".join(
                f"<item><instanceType>{name}</instanceType><availabilityZone>{zone}</availabilityZone>"
                f"<spotPrice>{price}</spotPrice><productDescription>Linux/UNIX</productDescription>"
                f"<timestamp>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(at_s))}</timestamp></item>"
                for name, zone, at_s, price in reversed(changes)
            )
            return xml(action, f"<spotPriceHistorySet>{rows}</spotPriceHistorySet>")
        return None

    def _price(self, asked: dict[str, Any]) -> Answer:
        if not self.on_demand:
            body = json.dumps({"__type": "AccessDeniedException", "message": "no pricing"})
            return Answer(400, body.encode(), {"Content-Type": "application/x-amz-json-1.1"})
        name = next(each["Value"] for each in asked["Filters"] if each["Field"] == "instanceType")
        terms = {
            "OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": str(self.on_demand.get(name, 0))}}}}}
        }
        body = json.dumps({"PriceList": [json.dumps({"terms": terms})], "FormatVersion": "aws_v1"})
        return Answer(200, body.encode(), JSON)

    def _ask_moto(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        kept = {name: value for name, value in headers.items() if name.lower() not in ("content-length", "connection")}
        connection.request("POST", path, body, kept)
        got = connection.getresponse()
        answer = Answer(got.status, got.read(), {"Content-Type": got.headers.get("Content-Type", "text/xml")})
        connection.close()
        return answer

    # --- for assertions

    def instances(self, *states: str) -> list[dict[str, Any]]:
        """All instances, or those in these states, as moto has them. Without states, includes those that EC2 has forgotten."""
        filters = [{"Name": "instance-state-name", "Values": list(states)}] if states else []
        found = []
        for client in (self.direct(), *self._elsewhere.values()):
            pages = client.get_paginator("describe_instances").paginate(Filters=filters)
            found += [each for page in pages for group in page["Reservations"] for each in group["Instances"]]
        return found if states else self._forgotten + found

    def forget(self) -> None:
        """Remove terminated instances from EC2's answers, as EC2 does an hour after their end. moto itself keeps them."""
        ended = self.instances("terminated")
        ids = {each["InstanceId"] for each in ended}
        self._forgotten += ended
        reservations = ec2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].reservations
        for name, reservation in list(reservations.items()):
            if ids.issuperset(each.id for each in reservation.instances):
                del reservations[name]

    def running(self) -> list[str]:
        return [each["InstanceId"] for each in self.instances("pending", "running")]


def xml(action: str, inner: str) -> Answer:
    text = f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>x</requestId>{inner}</{action}Response>'
    return Answer(200, text.encode(), {"Content-Type": "text/xml"})


def refusal(code: str, words: str) -> Answer:
    status = 503 if code == "RequestLimitExceeded" else 400
    error = f"<Error><Code>{code}</Code><Message>{words}</Message></Error>"
    text = f"<Response><Errors>{error}</Errors><RequestID>x</RequestID></Response>"
    return Answer(status, text.encode(), {"Content-Type": "text/xml"})


def empty_fleet(code: str, words: str) -> Answer:
    error = f"<item><errorCode>{code}</errorCode><errorMessage>{words}</errorMessage></item>"
    return xml("CreateFleet", f"<fleetId>fleet-0</fleetId><errorSet>{error}</errorSet><fleetInstanceSet/>")
