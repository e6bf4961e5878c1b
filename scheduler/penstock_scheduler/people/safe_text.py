"""Makes text safe before a person reads it, whoever wrote the text: the name of a job, a node's reason, a header of a request.

Control characters steer terminals, and break lines of logs. Directional and invisible characters make text look like another
one. They are shown escaped, as JSON escapes them, so a JSON document stays the same document.

The text is made safe where it leaves Penstock. Each program calls `guard` when it starts. After that, all that it prints is
safe, also what rich prints, whose own styles stay. Logs, pages, mails and metrics call `visible` or `one_line`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, cast

LONGEST = 10_000
"""Characters of a text in one line. Longer text is cut."""
LOG_LINE = 12_000
"""Characters of a line of a log, in UTF-8 below the 48 KiB from which journald makes several records of a line."""

_STEERING = ((0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F))
"""Control characters but the tab and the line feed: first and last code points."""
_INVISIBLE = (
    *(
        (0xAD, 0xAD),
        (0x34F, 0x34F),
        (0x61C, 0x61C),
        (0x115F, 0x1160),
        (0x17B4, 0x17B5),
        (0x180B, 0x180F),
        (0x200B, 0x200F),
    ),
    *((0x2028, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xD800, 0xDFFF), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0)),
    *((0xFFF0, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE01EF)),
)
"""Characters without a picture (Unicode's Default_Ignorable, without the variation selectors of emoji), separators of lines and
paragraphs, and halves of surrogate pairs."""
_UNSAFE = (*_STEERING, *_INVISIBLE)
_LINES = re.compile("[{}]".format("".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSAFE)))
_LINE = re.compile(f"[\t\n{_LINES.pattern[1:]}")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """A text of several lines. Line feeds and tabs stay; what else steers, deceives or is invisible is shown escaped."""
    return _LINES.sub(_escaped, text)


def one_line(text: str, most: int = LONGEST) -> str:
    """A text in one line: line feeds and tabs are shown escaped, too, and of a longer text the first `most` characters."""
    shown, left = text[:most], len(text) - most
    if not (shown.isascii() and shown.isprintable()):
        shown = _LINE.sub(_escaped, shown)[:most]
    return f"{shown}… ({left} more characters)" if left > 0 else shown


def _escaped(found: re.Match[str]) -> str:
    return _escape(found.group())


def _escape(character: str) -> str:
    code = ord(character)
    # No codec: a process that has become another user may not be able to load one.
    units = (code,) if code < 0x10000 else (0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF))
    return _SHORT.get(character) or "".join(f"\\u{unit:04x}" for unit in units)


class SafeStream:
    """A stream for text that makes visible what is written to it. It has no `buffer`, since bytes cannot be made visible."""

    def __init__(self, stream: Any) -> None:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks ends no command
        self._stream = stream

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        self._stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See `io.TextIOBase`."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError("a stream that makes text visible takes no bytes")
        return getattr(self._stream, name)


def exact(data: bytes) -> None:
    """Print a file that is to be kept: byte for byte, but made visible on a terminal."""
    stream = getattr(sys.stdout, "_stream", sys.stdout)
    if stream.isatty():
        sys.stdout.write(visible(data.decode(errors="backslashreplace")))
    else:
        stream.flush()
        stream.buffer.write(data)


class _Styled(SafeStream):
    """Such a stream for programs that print with rich, after `guard` has made its text visible."""

    @property
    def rich_proxied_file(self) -> Any:
        """Where rich prints: its styles are not to be shown as text."""
        return self._stream


def guard(*, rich: bool = True) -> None:
    """Make safe what this process prints from now on. To be called first by each program's `main`.

    Args:
        rich: whether it prints with rich, which takes memory. If not, rich's styles would be shown as text.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, (_Styled if rich else SafeStream)(stream))
    if rich:
        from rich import control

        guard_table(control._CONTROL_STRIP_TRANSLATE)


def guard_table(table: Any) -> None:
    """Let a library that leaves out some characters by this table show all that `visible` shows."""
    escaped = {code: _escape(chr(code)) for first, last in _UNSAFE for code in range(first, last + 1)}
    cast("dict[int, str]", table).update(escaped)
