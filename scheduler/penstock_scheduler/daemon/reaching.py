"""`penstockd --check`: everything that the settings name is asked: the store, certificates, the identity provider, the mail
server, webhooks. Clouds have a check of their own, `penstock cloud doctor`.

All are asked at once, each for a few seconds, so that one look shows all faults. No look writes or sends anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError

from penstock_scheduler.daemon.notices import NoticeSettings, mail_server
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.settings import DaemonSettings, Settings
from penstock_scheduler.store import schema
from penstock_scheduler.store.opening import is_server, name_of, open_engine

TIMEOUT_S = 5.0
"""How long each of them may take to answer, s."""


def faults(settings: Settings) -> list[str]:
    """A sentence, with the setting, for each that does not answer or cannot be used; empty if all is well."""
    daemon, api = settings.section(DaemonSettings), settings.section(ApiSettings)
    notices = settings.section(NoticeSettings)
    looks: list[tuple[str, Callable[[], None]]] = [
        ("[daemon] store", partial(_store, daemon.store or daemon.state_dir))
    ]
    if api.tls_certificate is not None and api.tls_key is not None:
        looks.append(("[api] tls_certificate", partial(_certificate, api.tls_certificate, api.tls_key)))
    if api.oidc is not None:
        looks.append(("[api.oidc]", partial(_identity_provider, api)))
    if notices.smtp is not None:
        looks.append(("[notices] smtp", partial(_mail, notices)))
    looks += [("[notices] webhooks", partial(_webhook, url)) for url in notices.webhooks]
    with ThreadPoolExecutor(len(looks)) as threads:
        found = threads.map(lambda look: _fault(*look), looks)
    return [fault for fault in found if fault]


def _fault(setting: str, look: Callable[[], None]) -> str:
    try:
        look()
    except (PenstockError, OSError, ValueError) as error:  # SMTP's errors are OSErrors
        return f"{setting}: {error}"
    return ""


def _store(where: str | Path) -> None:
    """Raises PenstockError if the store is there and cannot be used, or if its server does not let penstockd in."""
    if not is_server(where) and not (Path(where) / schema.FILE).exists():
        return  # penstockd makes it
    engine, name, _ = open_engine(where, lock=False)
    try:
        with engine.connect() as db:
            if schema.revision(db) is not None:
                schema.expect_usable(db, name)
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise PenstockError(f"{name_of(where)}: {cause}") from None
    finally:
        engine.dispose()


def valid_until_s(certificate: Path, key: Path) -> float:
    """When the certificate expires, s since 1970: a client in this process asks a server with it.

    Raises:
        ssl.SSLError: the two do not belong together, or the certificate is not valid now.
        OSError: they cannot be read.
    """
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=str(certificate))
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has signed it
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for end in (*ends, *ends):  # a hello of each, and an end of each
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    shown = ends[0].getpeercert()
    assert shown is not None
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _certificate(certificate: Path, key: Path) -> None:
    """Raises ValueError if the two cannot be used: not read, not of each other, or not valid now."""
    try:
        valid_until_s(certificate, key)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{certificate}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ValueError(f"{certificate} with the key {key}: {error.reason or error}") from None
    except OSError as error:
        missing = next((each for each in (certificate, key) if not each.is_file()), certificate)
        raise ValueError(f"{missing}: {error.strerror or error}") from None


def _identity_provider(api: ApiSettings) -> None:
    """Raises PenstockError if no log-in can begin there: its addresses and keys are fetched, and the secret is read."""
    from penstock_scheduler.daemon.service import oidc

    assert api.oidc is not None
    asyncio.run(oidc.Provider(api.oidc).begin("/"))


def _mail(settings: NoticeSettings) -> None:
    """Raises OSError if the mail server does not take a log-in of these settings."""
    try:
        with mail_server(settings, TIMEOUT_S) as server:
            server.noop()
    except OSError as error:
        raise ValueError(f"{settings.smtp}: {error}") from None


def _webhook(url: str) -> None:
    """Raises ValueError if no server listens at the URL. Sends nothing: a webhook may tell people."""
    parts = urlsplit(url)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or ""):
        return  # the proxy connects
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), TIMEOUT_S) as connection:
            if parts.scheme == "https":
                with ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname):
                    pass
    except OSError as error:
        raise ValueError(f"{parts.hostname}: {error}") from None
