"""Formats quantities for people."""

from __future__ import annotations

import math
import time


def duration(seconds: float) -> str:
    """A duration in the unit that fits it best."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} days"


def clock(time_s: float) -> str:
    """A time of the day, as the local clock shows it. `time_s`: s since 1970."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def moment(time_s: float) -> str:
    """A time and its date. `time_s`: s since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def times(ratio: float) -> str:
    """A ratio with sensible digits: "8 times", "1.4 times"."""
    return f"{ratio:.0f} times" if ratio >= 2.95 else f"{ratio:.1f} times"


def shortened(text: str, most: int = 120) -> str:
    """A text of at most `most` characters, for example of a list that may have thousands of names."""
    return text if len(text) <= most else text[: most - 3] + "..."


def money(usd: float) -> str:
    """An amount of money, with all cents and at least two significant digits, six decimals at most."""
    decimals = min(1 - math.floor(math.log10(abs(usd))), 6) if 0 < abs(usd) < 0.1 else 2
    return f"{usd:.{decimals}f}"


def dollars(usd: float) -> str:
    """An amount of US dollars, such as $0.0034 or $12.50."""
    return f"${money(usd)}"


def data_size(count: float) -> str:
    """A number of bytes in the unit that fits it best."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
