"""Captures `penstock top` in tmux at 80 and at 150 columns, as pictures.

    penstock playground up; sleep 300    # and export the variables that it prints
    python docs/images/top.py

Look at the pictures; they are written beside this file.
"""

from __future__ import annotations

import io
import re
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

SIZES = ((80, 24), (150, 30))
SERVER = "penstock-pictures"
"""A tmux of its own, so that nobody's windows are touched."""


def tmux(*arguments: str) -> str:
    """What a command of tmux prints."""
    return subprocess.run(["tmux", "-L", SERVER, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Capture both."""
    for wide, tall in SIZES:
        tmux(
            "new-session", "-d", "-s", f"s{wide}", "-x", str(wide), "-y", str(tall), "COLORTERM=truecolor penstock top"
        )
    time.sleep(15)
    for wide, _ in SIZES:
        console = Console(record=True, width=wide, file=io.StringIO())
        console.print(Text.from_ansi(tmux("capture-pane", "-e", "-p", "-N", "-t", f"s{wide}").rstrip()))
        picture = console.export_svg(title="penstock top", unique_id=f"top{wide}", theme=MONOKAI)
        picture = re.sub(
            r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL
        )  # they would be loaded from another site
        Path(__file__).with_name(f"top-{wide}.svg").write_text(picture, encoding="utf-8")
    tmux("kill-server")


if __name__ == "__main__":
    main()
