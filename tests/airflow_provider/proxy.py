"""A TCP proxy on loopback that can be cut: open connections break, and new ones are not answered."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Proxy:
    """Use as a context manager; listens on `port`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self.is_cut = False

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Cut the line: open connections break, and new ones get no answer."""
        self.is_cut = True
        for each in tuple(self._open):
            self._drop(each)

    def fix(self) -> None:
        """Restore the line for new connections. Connections that have waited since the cut are dropped."""
        self.cut()
        self.is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(ours)
            if self.is_cut:
                continue
            try:
                theirs = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # penstockd is away
                self._drop(ours)
                continue
            self._open.add(theirs)
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._drop(source)
        self._drop(sink)

    def _drop(self, each: socket.socket) -> None:
        self._open.discard(each)
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
