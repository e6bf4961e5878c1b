"""Writes the files of `penstock leader init`: certificates, settings and variables for several penstockd on one database.

openssl(1) makes the keys and certificates. Hosts that check certificates have it (Debian's ca-certificates depends on it), and a
package of Python for this would be one more to install and to keep up to date on every site.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import sqlalchemy as sa

from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.rounds.settings import DaemonSettings, parse_settings
from penstock_scheduler.safety import children

AUTHORITY_DAYS = 3650
DEFAULT_PORT = 7373

_OPENSSL = """[req]
prompt = no
distinguished_name = name
[name]
CN = Penstock
[authority]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


@dataclass(frozen=True, slots=True)
class Head:
    """A host of a penstockd, and the port of its API."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.host}:{self.port}"


def parse_heads(words: Sequence[str]) -> list[Head]:
    """The hosts of the penstockd, each as HOST or HOST:PORT. Raises ConfigError."""
    heads = []
    for word in words:
        found = re.fullmatch(r"([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::([0-9]{1,5}))?", word)
        if found is None:
            raise ConfigError(
                f"{word!r} is not a host or HOST:PORT; give a name or an IPv4 address, such as head1:7373"
            )
        heads.append(Head(found[1], int(found[2] or DEFAULT_PORT)))
    if len(heads) < 2:
        raise ConfigError("give two or more hosts, such as: penstock leader init head1 head2")
    if len({head.host for head in heads}) < len(heads):
        raise ConfigError("a host is given twice; each penstockd needs a host of its own")
    return heads


def write_heads(
    out: Path,
    heads: Sequence[Head],
    settings: str,
    source: Path,
    *,
    store: str | None,
    names: Sequence[str],
    folder: Path,
    munge: bool,
    days: int,
    authority: Path | None,
) -> None:
    """Write all files into `out`, or nothing.

    Args:
        settings: text of the site's settings file `source`, which each host gets with its own keys changed.
        store: URL of the database, unless `settings` have it.
        names: further names and addresses of the hosts for their certificates.
        folder: where the files will be on the hosts.
        days: how long the hosts' certificates are valid.
        authority: folder with the `ca.crt` and `ca.key` of an earlier call, if they are to sign.

    Raises:
        ConfigError: the settings cannot be those of several penstockd.
        PenstockError: `out` exists, or the files cannot be made.
    """
    found = parse_settings(settings, str(source))
    url = _server(store or found.section(DaemonSettings).store)
    if out.exists():
        raise PenstockError(f"{out} exists already; give another folder with --out")
    texts = {}
    for head in heads:
        keys: dict[str, dict[str, str | bool]] = {
            "daemon": {"store": url, "name": head.host},
            "api": {
                "listen": head.address,
                "tls": True,
                "tls_certificate": str(folder / "tls.crt"),
                "tls_key": str(folder / "tls.key"),
                "munge": munge,
            },
        }
        texts[head] = _with_keys(settings, keys, source)
        parse_settings(texts[head], f"{source} for {head.host}")
    try:
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as made:
            new = Path(made, "new")
            new.mkdir(mode=0o700)
            _certificates(new, heads, names, days, authority)
            for head, text in texts.items():
                _write(new / head.host / "penstock.toml", text, 0o600)  # its store may have a password
            urls = ",".join(f"https://{head.address}" for head in heads)
            _write(new / "penstock.sh", f"export PENSTOCK_URL={urls}\nexport PENSTOCK_CA={folder / 'ca.crt'}\n", 0o644)
            new.rename(out)
    except OSError as error:
        raise PenstockError(f"{error.filename}: {error.strerror}; give another folder with --out") from None


def _server(store: str | None) -> str:
    """The URL of a database that several penstockd can use. Raises ConfigError."""
    if store is None:
        raise ConfigError(
            "the settings name no database; several penstockd need PostgreSQL: --store postgresql+psycopg://penstock@db/penstock"
        )
    try:
        backend = sa.make_url(store).get_backend_name()
    except sa.exc.ArgumentError:
        backend = "unknown"
    if backend != "postgresql":
        raise ConfigError(
            f"several penstockd need PostgreSQL, such as postgresql+psycopg://...; the store is {backend}"
        )
    return store


def _with_keys(text: str, wanted: Mapping[str, Mapping[str, str | bool]], source: Path) -> str:
    """The settings file with these keys in these sections. All other lines stay. Raises ConfigError."""
    tables = tomllib.loads(text)
    lines = text.splitlines()
    for section, keys in wanted.items():
        tables[section] = tables.get(section, {}) | keys
        header = rf"\s*\[\s*{section}\s*\]\s*(#.*)?"
        at = next((index for index, line in enumerate(lines) if re.fullmatch(header, line)), len(lines))
        if at == len(lines):
            lines += [f"[{section}]"]
        end = next((index for index in range(at + 1, len(lines)) if lines[index].lstrip().startswith("[")), len(lines))
        old = re.compile(rf"\s*({'|'.join(keys)})\s*=")
        new = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        lines[at + 1 : end] = new + [line for line in lines[at + 1 : end] if not old.match(line)]
    made = "\n".join((*lines, ""))
    try:
        if tomllib.loads(made) == tables:
            return made
    except tomllib.TOMLDecodeError:
        pass
    sections = " and ".join(f"a section [{section}]" for section in wanted)
    raise ConfigError(f"{source} has a form in which the keys cannot be replaced; write {sections}, one key a line")


def _certificates(new: Path, heads: Sequence[Head], names: Sequence[str], days: int, authority: Path | None) -> None:
    """The authority in `new/ca`, and the key and the certificate of each host in its folder."""
    hosts = [*dict.fromkeys([*(head.host for head in heads), *names])]
    rules = new / "openssl.cnf"
    rules.write_text(_OPENSSL.format(names=", ".join(map(_alternative_name, hosts))), encoding="utf-8")
    own = new / "ca"
    own.mkdir(mode=0o700)
    signing = authority or own
    if authority is None:
        _request(rules, own / "ca.key", "-x509", "-extensions", "authority", *_for(AUTHORITY_DAYS), out=own / "ca.crt")
    else:
        for file in ("ca.crt", "ca.key"):
            if not (authority / file).is_file():
                raise PenstockError(f"there is no {file} in {authority}; give the folder ca of an earlier call")
        shutil.copyfile(authority / "ca.crt", own / "ca.crt")
    (own / "ca.crt").chmod(0o644)
    for head in heads:
        folder = new / head.host
        folder.mkdir(mode=0o700)
        request = folder / "request"
        _request(rules, folder / "tls.key", out=request)
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", f"{signing}/ca.crt", "-CAkey", f"{signing}/ca.key"),
            *("-extfile", str(rules), "-extensions", "server", *_for(days), "-out", f"{folder}/tls.crt"),
        )
        request.unlink()
        (folder / "tls.crt").chmod(0o644)
        shutil.copyfile(own / "ca.crt", folder / "ca.crt")
        (folder / "ca.crt").chmod(0o644)
    rules.unlink()


def _alternative_name(host: str) -> str:
    if re.search(r"[^A-Za-z0-9.:*-]", host):
        raise ConfigError(f"--name={host}: it is neither a host's name nor an address")
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _for(days: int) -> tuple[str, ...]:
    return ("-days", str(days), "-set_serial", f"0x{secrets.token_hex(16)}", "-sha256")


def _request(rules: Path, key: Path, *words: str, out: Path) -> None:
    curve: tuple[str, ...] = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-new", "-config", rules, *curve, "-keyout", key, *words, "-out", out)


def _openssl(*words: str | Path) -> None:
    """Run openssl(1); the files that it makes are its user's alone. Raises PenstockError."""
    path = children.found("openssl")
    if path is None:
        raise PenstockError(
            "openssl, which makes the certificates, is not installed here: apt-get install openssl, or run this on another host"
        )
    before = os.umask(0o077)
    try:
        done = children.run([path, *map(str, words)], env={}, timeout_s=60.0, cwd=str(Path.cwd()))
    finally:
        os.umask(before)
    if done.returncode != 0:
        raise PenstockError(f"openssl {words[0]} failed: {done.err.strip()[-500:]}")


def _write(path: Path, text: str, mode: int) -> None:
    path.touch(mode=mode)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
