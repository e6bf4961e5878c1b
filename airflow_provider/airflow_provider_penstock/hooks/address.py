"""Reads what people write into a connection: a host, an address pasted from a browser, and words for yes and no."""

from __future__ import annotations

from urllib.parse import urlsplit

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def yes_or_no(name: str, given: object) -> bool | None:
    """A field that is a JSON boolean or a word for one, or None if it is not given. Raises ValueError for other words."""
    if given is None or given == "":
        return None
    word = str(given).strip().lower()
    if word not in _WORDS:
        raise ValueError(f'{name} is {given!r}; write true or false, as in {{"{name}": false}}')
    return _WORDS[word]


def seconds(name: str, given: object) -> float:
    """A field that is a number of seconds. Raises ValueError for anything else."""
    try:
        return float(str(given))
    except ValueError:
        raise ValueError(f"{name} is {given!r}; write a number of seconds, such as 30") from None


def addresses(hosts: str, port: int | None, tls: bool | None) -> list[str]:
    """The URLs of one host or several, separated by commas. A host may have a scheme, a port and a path, which is left out.

    Raises:
        ValueError: the scheme is another one, or contradicts `tls`.
    """
    return [_address(host.strip(), port, tls) for host in hosts.split(",") if host.strip()]


def _address(host: str, port: int | None, tls: bool | None) -> str:
    scheme, has_scheme, rest = host.rpartition("://")
    if has_scheme and scheme.lower() not in ("http", "https"):
        raise ValueError(
            f"host {host} is not an address of penstockd; write its host name, such as penstock.example.org"
        )
    secure = scheme.lower() == "https" if has_scheme else tls is not False
    if tls is not None and secure != tls:
        raise ValueError(
            f"host {host} says {scheme}, and tls is {str(tls).lower()}; leave the scheme out, or set tls to {str(secure).lower()}"
        )
    if rest.count(":") > 1 and not rest.startswith("["):  # IPv6
        rest = f"[{rest}]"
    parts = urlsplit(f"//{rest}")
    name = parts.hostname or ""
    own_port = parts.port or port
    return (
        f"{'https' if secure else 'http'}://{f'[{name}]' if ':' in name else name}{f':{own_port}' if own_port else ''}"
    )
