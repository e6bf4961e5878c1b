"""Where a request comes from: the peer, or the client of a reverse proxy; and whom an address counts for."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def client_address(peer: str, forwarded: Iterable[str], trusted: Collection[Network]) -> str:
    """The address of the client that sent a request.

    Each proxy adds the address that it saw to the header X-Forwarded-For, and whoever is no proxy may write anything there. So
    the header is read from its end, for as long as a trusted proxy has written it.

    Args:
        peer: the address of the connection; empty on a Unix socket.
        forwarded: the values of the headers X-Forwarded-For, in their order.
        trusted: networks of the site's own proxies.
    """
    at = peer
    for given in reversed([each for line in forwarded for each in line.split(",")]):
        if not _is_in(at, trusted) or (found := _address(given)) is None:
            break
        at = str(found)
    return at


def host_of(address: str) -> str:
    """The host that an address counts for, by which clients are limited: an IPv6 host has a whole /64."""
    found = _address(address)
    if found is None or found.version == 4:
        return address
    return str(ipaddress.ip_network((int(found), 64), strict=False))


def _is_in(address: str, networks: Collection[Network]) -> bool:
    found = _address(address)
    return found is not None and any(found.version == each.version and found in each for each in networks)


def _address(text: str) -> Address | None:
    """The address in a text, which may have a port or a zone; None: there is none. IPv4 within IPv6 is IPv4."""
    host = text.strip().partition("%")[0]
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return found.ipv4_mapped or found if found.version == 6 else found
