"""What `run.step` costs over a plain DDP step of 50 ms: both in one run, side by side, in turns.

    python benchmarks/executor.py [--processes 2] [--steps 60] [--rounds 6]

Each round makes `steps` steps with DDP alone (forward, backward, optimiser), then as many with `run.step`, on the same model and
data; the ratio is of the medians of all rounds. Real processes on CPUs (gloo), one thread each. The last line is JSON. Fails
above a ratio of 1.02.

On a machine with other work, compare only the ratio, and that over several runs.
"""

import argparse
import json
import logging
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.02
STEP_MS = 50
BATCH = 32


class Ones:
    """Random vectors; loading them takes no time worth speaking of."""

    def __init__(self, size, width):
        import torch

        self.x = torch.randn(size, width)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


def worker(options):
    import torch

    import penstock_executor as px

    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = px.start(Path(options.folder) / "checkpoints", report_every_s=1.0)
    width, depth = 512, 8  # 2.1 million parameters in 16 tensors

    def make():
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers)

    plain = make()
    began = time.perf_counter()
    for _ in range(5):
        plain(torch.randn(BATCH, width)).square().mean().backward()
    ours_ms = (time.perf_counter() - began) / 5 * 1000
    # The rest of the 50 ms is slept, as a GPU would compute: no processor is kept from the others meanwhile.
    nap_s = max(STEP_MS - run._group.from_first(ours_ms), 0) / 1000
    model = make()
    data = Ones(BATCH * run.world * options.steps * (options.rounds + 1), width)
    wrapped, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), data, batch_size=BATCH * run.world
    )
    plain.zero_grad()
    if run.world > 1:
        plain = torch.nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    times = {"plain": [], "penstock": []}
    batches = iter(loader)
    next(run.epochs(1))

    def plain_step(x):
        loss = plain(x).square().mean()
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def our_step(x):
        run.step(wrapped(x).square().mean())

    for round_number in range(options.rounds + 1):
        for name in ("plain", "penstock"):
            for _ in range(options.steps):
                x = next(batches) if name == "penstock" else torch.randn(BATCH, width)
                began = time.perf_counter()
                time.sleep(nap_s)
                (our_step if name == "penstock" else plain_step)(x)
                if round_number:  # the first warms up
                    times[name].append(time.perf_counter() - began)
    if run.rank == 0:
        Path(options.folder, "times.json").write_text(json.dumps(times))
        reports = list(Path(options.folder, "spool", "1", "reports").glob("*.jsonl"))
        lines = reports[0].read_bytes().splitlines() if reports else []
        Path(options.folder, "reports.json").write_text(json.dumps([len(line) for line in lines]))
    run._group.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        return worker(options)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        Path(folder, "spool").mkdir()
        common = dict(os.environ, WORLD_SIZE=str(options.processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        common |= {"LOCAL_WORLD_SIZE": str(options.processes), "SLURM_JOB_ID": "1", "PENSTOCK_SPOOL": f"{folder}/spool"}
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        processes = [
            subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(options.processes)
        ]
        if any(process.wait() for process in processes):
            return 1
        times = json.loads(Path(folder, "times.json").read_text())
        sizes = json.loads(Path(folder, "reports.json").read_text())
    medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
    ratio = medians["penstock"] / medians["plain"]
    print(
        f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    )
    for name, values in times.items():
        quarters = [quarter * 1000 for quarter in statistics.quantiles(values, n=4)]
        print(
            f"{name:9} median {medians[name]:.2f} ms, quartiles {quarters[0]:.2f} and {quarters[2]:.2f}, {len(values)} steps"
        )
    print(f"{len(sizes)} reports at one a second, the longest {max(sizes, default=0)} bytes")
    result = {
        "ratio": round(ratio, 4),
        "limit": LIMIT,
        "processes": options.processes,
        "report_bytes": max(sizes, default=0),
    }
    print(json.dumps(result | {f"{name}_ms": round(value, 3) for name, value in medians.items()}))
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
