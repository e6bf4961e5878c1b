"""What `run.step` costs over a plain DDP step of 50 ms. One run measures both alternately.

    python benchmarks/executor.py [--processes 2] [--steps 20] [--rounds 60] [--optimizer adamw]

Each round makes `steps` steps with DDP alone (next batch, forward, backward, optimiser), then as many with the loader
of `prepare` and `run.step`, on the same model and data. Every other round begins with Penstock's steps. A round's ratio
is that of its two means, so it includes the cost of measured steps. The result is the median over the rounds, for two
phases: in the first `FIRST` steps of a job every gradient is measured, and after `SETTLED` steps only that of one step
in several. The processes are real, on CPUs (gloo), with one thread each. The last line is JSON. The benchmark fails if
the ratio after `SETTLED` is above 1.02. Besides wall-clock time it prints processor time, which other work on the
machine affects less, and what `run.step` adds to it as a share of 50 ms.

On a machine with other work, compare only ratios, over several runs.
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
KINDS = ("plain", "penstock")
WARM_UP, FIRST, SETTLED = 40, 500, 580


class Ones:
    """Random vectors; loading them takes almost no time."""

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
    run = px.start(Path(options.folder) / "checkpoints", report_every_s=options.report_every)
    width, depth = 512, 8  # 2.1 million parameters in 16 tensors

    def make():
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers)

    plain = make()
    began = time.perf_counter()
    for _ in range(5):
        plain(torch.randn(BATCH, width)).square().mean().backward()
    ours_ms = (time.perf_counter() - began) / 5 * 1000
    # Sleep for the rest of the 50 ms, as if a GPU computed: the other processes can use the processor meanwhile.
    nap_s = max(STEP_MS - run._group.from_first(ours_ms), 0) / 1000
    model = make()
    data = Ones(BATCH * run.world * (SETTLED + options.steps * options.rounds), width)

    def optimizer_of(model):
        kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.SGD
        return kind(model.parameters(), lr=1e-5)

    wrapped, _, loader = run.prepare(model, optimizer_of(model), data, batch_size=BATCH * run.world)
    plain.zero_grad()
    if run.world > 1:
        plain = torch.nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    plain_optimizer = optimizer_of(plain)
    sampler = torch.utils.data.DistributedSampler(data, run.world, run.rank)
    batches = {
        "plain": iter(torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)),
        "penstock": iter(loader),
    }
    next(run.epochs(1))

    def plain_step(x):
        loss = plain(x).square().mean()
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def our_step(x):
        run.step(wrapped(x).square().mean())

    def step(kind):
        x = next(batches[kind])
        time.sleep(nap_s)
        (our_step if kind == "penstock" else plain_step)(x)

    found = measure(run, step, options)
    if run.rank == 0:
        Path(options.folder, "times.json").write_text(json.dumps({"found": found, "every": run.measured_every}))
        reports = list(Path(options.folder, "spool", "1", "reports").glob("*.jsonl"))
        lines = reports[0].read_bytes().splitlines() if reports else []
        Path(options.folder, "reports.json").write_text(json.dumps([len(line) for line in lines]))
    run._group.barrier()


def measure(run, step, options):
    """Times of `step(kind)` in rounds of both kinds: in the first steps of the run, and when the estimates have
    settled."""
    found = [{f"{kind}_{clock}": [] for kind in KINDS for clock in ("s", "work_s")} for _ in range(2)]

    def timed(kind, count):
        began_s, began_work_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            step(kind)
        return (time.perf_counter() - began_s) / count, (time.process_time() - began_work_s) / count

    for kind in KINDS:
        timed(kind, WARM_UP)
    for number, phase in enumerate([0] * ((FIRST - WARM_UP) // options.steps) + [1] * options.rounds):
        if phase == 1 and run.steps < SETTLED:
            for kind in KINDS:
                timed(kind, SETTLED - run.steps if kind == "penstock" else 1)
        for kind in KINDS[:: 1 if number % 2 else -1]:
            seconds, work_s = timed(kind, options.steps)
            found[phase][f"{kind}_s"].append(seconds)
            found[phase][f"{kind}_work_s"].append(work_s)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adamw"])
    parser.add_argument("--report-every", type=float, default=30.0, metavar="S", help="(30, as in jobs)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    most = (FIRST - WARM_UP) // 2
    if not 1 <= options.steps <= most or options.rounds < 2:
        parser.error(f"quartiles take 2 rounds of each kind: --steps from 1 to {most}, --rounds of at least 2")
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
        told = json.loads(Path(folder, "times.json").read_text())
        sizes = json.loads(Path(folder, "reports.json").read_text())
    print(
        f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} processors, load"
        f" {os.getloadavg()[0]:.1f}"
    )
    result = {"limit": LIMIT, "processes": options.processes, "optimizer": options.optimizer}
    for name, found in zip(("first", "settled"), told["found"], strict=True):
        times = ", ".join(f"{kind} {statistics.median(found[f'{kind}_s']) * 1000:.2f} ms" for kind in KINDS)
        print(f"{name}: a step of {times}; {len(found['plain_s'])} rounds of {options.steps} steps")
        for clock, text in (("s", "wall clock"), ("work_s", "processor time")):
            pairs = zip(found[f"plain_{clock}"], found[f"penstock_{clock}"], strict=True)
            low, middle, high = statistics.quantiles([ours / plain for plain, ours in pairs], n=4)
            print(f"{name}: {text}: ratio {middle:.4f}, quartiles of the rounds {low:.4f} and {high:.4f}")
            result[f"{name}_{text.replace(' ', '_')}_ratio"] = round(middle, 4)
        pairs = zip(found["plain_work_s"], found["penstock_work_s"], strict=True)
        low, middle, high = statistics.quantiles([(ours - plain) * 1000 for plain, ours in pairs], n=4)
        print(
            f"{name}: {middle:.2f} ms more of processor time a step, quartiles of the rounds {low:.2f} and {high:.2f}"
        )
        result[f"{name}_added_processor_share"] = round(middle / STEP_MS, 4)
    print(f"one step in {told['every']} is measured; {len(sizes)} reports, the longest {max(sizes, default=0)} bytes")
    print(json.dumps(result | {"every": told["every"], "report_bytes": max(sizes, default=0)}))
    return int(result["settled_wall_clock_ratio"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
