"""Log-in with a password, which PAM checks: in a process of its own, since PAM's modules are a site's own.

penstockd runs this module: `python -m penstock_scheduler.daemon.service.passwords SERVICE USER`, with the password on standard
input. The exit status is 0 if PAM takes the password and the account may be used, 1 if not, 2 if PAM cannot be asked.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.safety import children
from penstock_scheduler.safety.children import ChildError, Pool

AT_ONCE, WAITING = 8, 200
"""Most checks at the same time, of which one user has at most half, and checks that wait."""
_TIMEOUT_S = 30.0
_REFUSED = 1


class Passwords:
    """Checks passwords by a service of PAM."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._pool = Pool("log-ins", AT_ONCE, WAITING)

    async def check(self, user: str, password: str) -> None:
        """Return if it is the user's password. Raises Refusal: 401, it is not; 503, PAM cannot be asked; and Busy."""
        argv = [sys.executable, "-m", __name__, self._service, user]
        ask = partial(children.run, argv, env=os.environ, input=password.encode(), timeout_s=_TIMEOUT_S)
        try:
            done = await self._pool.call(user, ask)
        except ChildError:
            raise Refusal(503, "busy", "PAM does not answer; try again, or use a token", retry_after_s=10) from None
        if done.returncode == _REFUSED:
            raise Refusal(401, "unauthenticated", "the user or the password is wrong")
        if done.returncode != 0:
            last = (done.err.strip().splitlines() or ["no reason"])[-1]
            raise Refusal(503, "not-ready", f"PAM cannot be asked: {last[:300]}; use a token", retry_after_s=60)


def main(service: str, user: str) -> int:
    """See the module."""
    try:
        import pamela
    except (ImportError, OSError) as error:
        sys.stderr.write(f"pamela is not usable ({error}); install the extra login of penstock-scheduler\n")
        return 2
    try:
        pamela.authenticate(user, sys.stdin.read(), service=service)
    except pamela.PAMError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
