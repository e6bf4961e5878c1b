"""Draws states.svg from the table of transitions: `python docs/images/states.py`. A test holds the picture to the table."""

from __future__ import annotations

import math
from pathlib import Path

from penstock_slurm.jobs.states import TRANSITIONS, State

PLACE = {
    State.HELD: (110, 120, "PENDING, priority 0"),
    State.PLACING: (420, 60, "PENDING, released"),
    State.RUNNING: (740, 120, "RUNNING, CONFIGURING, …"),
    State.SUSPENDED: (1010, 70, "SUSPENDED, STOPPED"),
    State.CHECKPOINTING: (740, 300, "asked, no answer yet"),
    State.STOPPING: (400, 300, "has answered; COMPLETING"),
    State.LOST: (1010, 330, "a node is silent; forgotten"),
    State.DONE: (570, 500, "COMPLETED, CANCELLED, …"),
}
"""Middle of each box, and what Slurm shows."""

LABELS = {
    (State.HELD, State.PLACING): "epoch, place, release",
    (State.PLACING, State.HELD): "hold",
    (State.PLACING, State.RUNNING): "Slurm starts it",
    (State.RUNNING, State.CHECKPOINTING): "asked to save",
    (State.CHECKPOINTING, State.STOPPING): "saved, or out of time",
    (State.STOPPING, State.HELD): "GPUs are free",
    (State.RUNNING, State.STOPPING): "answers no requests",
}

WIDTH, HEIGHT = 212, 54
STYLE = """
.box{fill:#eef3fa;stroke:#4e79a7;stroke-width:1.5}.bg{fill:#fff}
text{font:14px system-ui,sans-serif;fill:#1b1f24;text-anchor:middle}
.s{font-size:12px;fill:#556}.l{font-size:12px;fill:#1f4e79;paint-order:stroke;stroke:#fff;stroke-width:4px}
.main{fill:none;stroke:#4e79a7;stroke-width:2;marker-end:url(#main)}
.end{fill:none;stroke:#b4bcc6;stroke-width:1.2;marker-end:url(#end)}
.lost{fill:none;stroke:#d98a86;stroke-width:1.2;stroke-dasharray:5 4;marker-end:url(#lost)}
"""
COLOURS = {"main": "#4e79a7", "end": "#b4bcc6", "lost": "#d98a86"}


def edge(here: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Where the line from a box's middle leaves the box."""
    dx, dy = towards[0] - here[0], towards[1] - here[1]
    scale = min(
        (WIDTH / 2 + 3) / abs(dx) if dx else math.inf,
        (HEIGHT / 2 + 3) / abs(dy) if dy else math.inf,
    )
    return here[0] + dx * scale, here[1] + dy * scale


def arrow(source: State, target: State) -> str:
    """A slightly bent arrow, always to the same side, so that there and back do not lie on each other."""
    (x1, y1, _), (x2, y2, _) = PLACE[source], PLACE[target]
    length = math.hypot(x2 - x1, y2 - y1)
    nx, ny = (y2 - y1) / length, (x1 - x2) / length
    bend = 22 + 0.03 * length
    middle = (x1 + x2) / 2 + nx * bend, (y1 + y2) / 2 + ny * bend
    (ax, ay), (bx, by) = edge((x1, y1), middle), edge((x2, y2), middle)
    kind = "lost" if State.LOST in (source, target) else "end" if State.DONE in (source, target) else "main"
    title = f"<title>{source.value} to {target.value}: {TRANSITIONS[source, target]}</title>"
    line = (
        f'<path id="{source.value}-{target.value}" class="{kind}" '
        f'd="M{ax:.0f} {ay:.0f}Q{middle[0]:.0f} {middle[1]:.0f} {bx:.0f} {by:.0f}">{title}</path>'
    )
    if (source, target) in LABELS:
        x, y = (ax + 2 * middle[0] + bx) / 4 + nx * 12, (ay + 2 * middle[1] + by) / 4 + ny * 12
        line += f'<text class="l" x="{x:.0f}" y="{y + 4:.0f}">{LABELS[source, target]}</text>'
    return line


def picture() -> str:
    """The whole of it."""
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<polygon points="0,0 8,4 0,8" fill="{colour}"/></marker>'
        for name, colour in COLOURS.items()
    )
    order = {"lost": 0, "end": 1, "main": 2}
    arrows = sorted(
        (arrow(*pair) for pair in TRANSITIONS), key=lambda text: order[text.split('class="')[1].split('"')[0]]
    )
    boxes = "\n".join(
        f'<g id="state-{state.value}"><rect class="box" x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="8"/><text x="{x}" y="{y - 3}">{state.value}</text>'
        f'<text class="s" x="{x}" y="{y + 16}">{words}</text></g>'
        for state, (x, y, words) in PLACE.items()
    )
    told = "The states of a job: " + "; ".join(f"{a.value} to {b.value}" for a, b in TRANSITIONS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1120 550" role="img" aria-label="{told}">\n'
        f'<style>{STYLE}</style>\n<defs>{markers}</defs>\n<rect class="bg" width="1120" height="550"/>\n'
        + "\n".join(arrows)
        + f"\n{boxes}\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("states.svg").write_text(picture())
