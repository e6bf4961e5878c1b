"""Measured tables that we made up, linear so that every answer can be worked out by hand, and exact in binary where it matters.

step(N, K, m) = 0.2 m + 0.2 N + 0.1 (K - N), of which sync = 0.05 K. Nodes of 4 GPUs; measured up to 2 nodes, and 3 with 6 GPUs.
"""

from __future__ import annotations

from pathlib import Path

SHAPES = ("1", "2", "4", "11", "13", "22", "44")


def step_s(nodes: int, gpus: int, batch: float) -> float:
    return 0.2 * batch + 0.2 * nodes + 0.1 * (gpus - nodes)


def sync_s(gpus: int) -> float:
    return 0.05 * gpus


def write_profiles(folder: Path) -> Path:
    """Model `toy`, on t4: initial batch 8, largest 16, two epochs that end after 10 and 19 iterations."""
    model = folder / "toy"
    model.mkdir(parents=True)
    rows = ["placement,local_bsz,step_time,sync_time"]
    for shape in SHAPES:
        gpus = sum(map(int, shape))
        rows += [f"{shape},{batch},{step_s(len(shape), gpus, batch)},{sync_s(gpus)}" for batch in (4, 8)]
    (model / "placements-t4.csv").write_text("\n".join(rows) + "\n")
    rows = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    rows += [f"3,6,{batch},{step_s(3, 6, batch)},{sync_s(6)}" for batch in (4, 8)]
    (model / "scalability-t4.csv").write_text("\n".join(rows) + "\n")
    head = "progress,iteration,metric,grad_sqr,grad_var\n"
    (model / "validation-8.csv").write_text(head + "10,10,0.5,1,3\n20,20,0.6,1,1\n30,30,0.7,1,1\n")
    (model / "validation-16.csv").write_text(head + "11,7,0.5,1,3\n19,12,0.6,3,1\n31,20,0.7,1,1\n")
    facts = "application,max_epochs,restart_s_simulated,restart_s_policy,slowdown\ntoy,2,40,30,2\n"
    (folder / "applications.csv").write_text(facts)
    return folder
