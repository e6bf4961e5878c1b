"""How long a loopback cluster takes to come up and to go down, by its number of nodes.

    python benchmarks/loopback.py [--nodes 11 64] [--trials 5]

Each trial also runs a job on every node before it counts, so that only working clusters are timed. Prints a
line for each size and, last, one JSON object. The limits are those of issue 2: 5 s for 11 nodes, 30 s for 64.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from penstock_loopback import LoopbackCluster
from penstock_loopback.machine import program

LIMITS_S = {11: 5.0, 64: 30.0}


def trial(folder: Path, nodes: int) -> dict[str, float]:
    """Seconds of `up` and `down`, and proportional memory (PSS) of all processes in between in MB."""
    cluster = LoopbackCluster(folder, f"t4:{nodes}x4")
    start_s = time.perf_counter()
    with cluster:
        up_s = time.perf_counter() - start_s
        ran = cluster.command("srun", f"-N{nodes}", "--gres=gpu:1", "printenv", "SLURMD_NODENAME", timeout_s=120)
        assert sorted(ran.stdout.split()) == sorted(node.name for node in cluster.nodes), ran.stdout
        pss_kb = sum(_pss_kb(process.pid) for process in cluster.processes())
        start_s = time.perf_counter()
    return {"up_s": up_s, "down_s": time.perf_counter() - start_s, "pss_mb": pss_kb / 1024}


def _pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Run the trials and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[11, 64])
    parser.add_argument("--trials", type=int, default=5)
    arguments = parser.parse_args()
    sizes = []
    for nodes in arguments.nodes:
        with tempfile.TemporaryDirectory() as folder:
            trials = [trial(Path(folder) / str(number), nodes) for number in range(arguments.trials)]
        size: dict[str, object] = {"nodes": nodes, "trials": len(trials)}
        for key in trials[0]:
            values = [one[key] for one in trials]
            size[key] = {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}
        slowest_s = max(one["up_s"] for one in trials)
        limit_s = LIMITS_S.get(nodes)
        size["within_limit"] = None if limit_s is None else slowest_s < limit_s
        sizes.append(size)
        print(
            f"{nodes} nodes: up in {statistics.median(one['up_s'] for one in trials):.2f} s (slowest {slowest_s:.2f} s"
            f"{'' if limit_s is None else f', limit {limit_s:g} s'}), "
            f"down in {statistics.median(one['down_s'] for one in trials):.2f} s, "
            f"{statistics.median(one['pss_mb'] for one in trials):.0f} MB"
        )
    slurmctld = program("slurmctld")
    assert slurmctld is not None, "it ran just now"
    slurm = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    print(json.dumps({"benchmark": "loopback", "slurm": slurm, "machine": machine, "sizes": sizes}))


if __name__ == "__main__":
    main()
