"""Who a caller is: by the socket and by tokens. test_transport.py has MUNGE and TLS."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import ApiError, Client
from tests.scheduler.service.api import ME, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_on_the_socket_the_kernel_identifies_the_caller(api):
    with Client(api.socket) as me:
        assert (me.me().user, me.me().by, me.me().role) == (ME, "socket", "admin")
        assert me.me().uid == os.getuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_on_the_socket_another_user_is_that_user(api, tmp_path):
    """A real process of another uid, whatever it says of itself."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)
    request = b"GET /v1/me HTTP/1.1\r\nHost: x\r\nX-User: root\r\nConnection: close\r\n\r\n"
    code = (
        f"import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect({api.socket[5:]!r}); s.sendall({request!r}); "
    )
    code += "sys.stdout.buffer.write(b''.join(iter(lambda: s.recv(4096), b'')))"
    done = subprocess.run(["/usr/bin/python3", "-c", code], user="nobody", capture_output=True, check=True, cwd="/")
    assert b'"user":"nobody"' in done.stdout
    assert b'"role":"user"' in done.stdout


def test_tokens_expire_and_are_revoked_at_once(api):
    with Client(api.socket) as me:
        made = me.create_token(TokenOrder(user="ada", expires_s=time.time() - 1))
        with pytest.raises(ApiError, match="expired"):
            Client(api.url, token=made.token).me()
        good = me.create_token(TokenOrder(user="ada"))
        with Client(api.url, token=good.token) as ada:
            assert ada.me().user == "ada"
            assert me.revoke_token(good.view.id).revoked
            with pytest.raises(ApiError, match="revoked") as error:
                ada.me()
            assert (error.value.status, error.value.code) == (401, "unauthenticated")
    assert good.token.split("_", 2)[2] not in str(list(api.board.store.export()))
    for wrong in ("", "x", "penstock__", good.token[:-1], "penstock_' or 1=1 --_x"):
        with pytest.raises(ApiError, match="token"):
            Client(api.url, token=wrong or "penstock").me()
