"""Where a request comes from, behind reverse proxies and without them."""

from __future__ import annotations

import ipaddress

import httpx
import pytest

from penstock_scheduler.daemon.service.identity import client_address, host_of
from tests.scheduler.service.api import serving

OURS = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("8.8.8.8", ["1.1.1.1"], "8.8.8.8"),  # a stranger says what it likes
        ("10.1.0.1", [], "10.1.0.1"),
        ("10.1.0.1", ["1.1.1.1"], "1.1.1.1"),
        ("10.1.0.1", ["9.9.9.9, 1.1.1.1"], "1.1.1.1"),  # the client wrote the first
        ("10.1.0.1", ["9.9.9.9", "1.1.1.1"], "1.1.1.1"),
        ("10.1.0.1", ["9.9.9.9, 1.1.1.1, 10.1.2.3"], "1.1.1.1"),  # two proxies
        ("10.1.0.1", ["10.1.7.7"], "10.1.7.7"),  # a client beside the proxies
        ("10.1.0.1", ["1.1.1.1, unknown"], "10.1.0.1"),
        ("10.1.0.1", ["1.1.1.1, "], "10.1.0.1"),
        ("10.1.0.1", ["1.1.1.1:5678"], "1.1.1.1"),
        ("::ffff:10.1.0.1", ["2001:db8::7"], "2001:db8::7"),
        ("fd00::1", ["[2001:db8::7]:443"], "2001:db8::7"),
        ("", ["1.1.1.1"], ""),  # a Unix socket
    ],
)
def test_the_header_counts_as_far_as_our_proxies_wrote_it(peer, forwarded, client):
    assert client_address(peer, forwarded, OURS) == client


def test_an_ipv6_host_has_a_whole_network():
    assert host_of("2001:db8::1") == host_of("2001:db8::2:3") != host_of("2001:db8:0:1::1")
    assert (host_of("1.2.3.4"), host_of("fe80::1%eth0"), host_of("")) == ("1.2.3.4", "fe80::/64", "")


WRONG = {"Authorization": "Bearer penstock_0123456789abcdef_x"}


def refused(api, *addresses: str) -> set[int]:
    """The answers to many log-ins that fail, each from the next of these addresses, up to the first that is told to wait."""
    told = set()
    with httpx.Client(base_url=api.url, headers=WRONG, timeout=60) as line:
        for number in range(1000):
            forwarded = {"X-Forwarded-For": addresses[number % len(addresses)]}
            told.add(line.get("/v1/me", headers=forwarded).status_code)
            if 429 in told:
                break
    return told


def failed(api, address: str) -> int:
    return httpx.get(f"{api.url}/v1/me", headers=WRONG | {"X-Forwarded-For": address}, timeout=60).status_code


def test_nobody_is_believed_by_default(tmp_path):
    """An attacker with another address in each request is limited as one, and the audit log has the real address."""
    with serving(tmp_path) as api:
        assert refused(api, *(f"1.1.1.{n}" for n in range(60))) == {401, 429}
        headers = {"Authorization": f"Bearer {api.tokens['oz']}", "X-Forwarded-For": "1.1.1.1"}
        assert httpx.post(f"{api.url}/v1/jobs/1/hold", headers=headers).status_code == 200
        assert api.board.store.audit()[0].address == "127.0.0.1"


@pytest.mark.parametrize("separate", [False, True], ids=["embedded", "separate"])
def test_behind_a_trusted_proxy_clients_are_limited_by_their_own_addresses(tmp_path, separate):
    with serving(tmp_path, separate=separate, trusted_proxies=["127.0.0.1"]) as api:
        assert refused(api, *(f"9.9.9.9, 2001:db8::{n}" for n in range(60))) == {401, 429}, "one host"
        assert failed(api, "9.9.9.9, 1.1.1.2") == 401, "another client behind the same proxy"
        headers = {"Authorization": f"Bearer {api.tokens['oz']}", "X-Forwarded-For": "1.1.1.1"}
        assert httpx.post(f"{api.url}/v1/jobs/1/hold", headers=headers).status_code == 200
        assert api.board.store.audit()[0].address == "1.1.1.1"
