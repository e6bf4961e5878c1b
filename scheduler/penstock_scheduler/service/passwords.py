"""Log-in with a password, which PAM checks: in a process of its own, since PAM's modules are a site's own.

penstockd runs this module: `python -m penstock_scheduler.service.passwords SERVICE USER`, with the password on standard
input. The exit status is 0 if PAM takes the password and the account may be used, 1 if not, 2 if PAM cannot be asked.
"""

from __future__ import annotations

import asyncio
import sys

from penstock_scheduler.service.errors import Refusal

AT_ONCE = 4
"""Most checks at the same time."""
_TIMEOUT_S = 30.0
_REFUSED = 1


class Passwords:
    """Checks passwords by a service of PAM."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def check(self, user: str, password: str) -> None:
        """Return if it is the user's password. Raises Refusal: 401, it is not; 503, PAM cannot be asked."""
        async with self._turns:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                self._service,
                user,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                _, why = await asyncio.wait_for(process.communicate(password.encode()), _TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise Refusal(503, "busy", "PAM does not answer; try again, or use a token", retry_after_s=10) from None
        if process.returncode == _REFUSED:
            raise Refusal(401, "unauthenticated", "the user or the password is wrong")
        if process.returncode != 0:
            last = (why.decode(errors="replace").strip().splitlines() or ["no reason"])[-1]
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
