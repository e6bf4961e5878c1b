"""`penstock simulate`: what would have become of these jobs on this cluster, under these policies?

Only the options are here, so that asking for them takes no second: what they do is in `simulation`. Those about jobs
that share GPUs are `penstock whatif`'s, too.
"""

from __future__ import annotations

from pathlib import Path

import typer

from penstock_scheduler.cli.options import POLICIES, STAGE

PAIRS = typer.Option(
    None,
    help="For policies that let jobs share GPUs: a table of what jobs lose beside each other; `whatif` without it takes what the "
    "site has learned. See docs/admin/simulator.md.",
)
PAIR_TYPES = typer.Option(
    "", help="Of --pairs: the type of the table that stands for one of the cluster, such as t4=p100,a100=v100."
)
DRAW_KINDS = typer.Option(
    False, help="Of --pairs: a job of no kind of the table gets one that runs on as many GPUs, at random."
)
AGENTS = typer.Option("", help="What sharing costs, such as switch_s=1,noise=0.03.")
ASSUME_UTILISATION = typer.Option(
    None,
    min=0.0,
    max=1.0,
    help="What a job that shares uses of a GPU alone, where nobody knows; 1, all of it, if not given.",
)


def simulate_command(
    cluster: str = typer.Option(..., help="The nodes: a spec such as t4:6x4,rtx:3x8, or a file with a part a line."),
    workload: Path = typer.Option(..., help="The jobs: a workload, or a trace; see docs/admin/workloads.md."),
    policy: str = POLICIES,
    stage: list[str] = STAGE,
    profiles: Path | None = typer.Option(None, help="Folder of measured tables, for the models of the workload."),
    seeds: int = typer.Option(
        1, min=1, help="Simulate so many times, with other luck each; see docs/admin/simulator.md."
    ),
    out: Path | None = typer.Option(None, help="Folder for report, tables and summary."),
    config: Path | None = typer.Option(None, help="A settings file, whose sections policy.NAME apply."),
    trace: str | None = typer.Option(
        None, "--format", help="What the workload is; told from its first line if not given."
    ),
    sensitivities: Path | None = typer.Option(
        None, help="Folder of profiles of CPU and memory; see docs/admin/synergy.md."
    ),
    gpu_types: str = typer.Option("", help="GPU types beside those of the catalogue, such as mi50,k40."),
    gpu_speeds: str = typer.Option("", help="For recorded durations: relative speeds, such as a100=1,h100=2."),
    prices: str = typer.Option("", help="Of a GPU-hour, such as t4=0.4,a100=2.5."),
    disturb: str = typer.Option("", help="What goes wrong, such as node_mtbf_h=500,estimation_error=0.1."),
    unprofiled: bool = typer.Option(
        False, help="Jobs know nothing of their speed before they run; sia measures them in their first rounds."
    ),
    pairs: Path | None = PAIRS,
    pair_types: str = PAIR_TYPES,
    draw_kinds: bool = DRAW_KINDS,
    agents: str = AGENTS,
    assume_utilisation: float | None = ASSUME_UTILISATION,
    parquet: bool = typer.Option(False, help="Write the tables as Parquet, not CSV; needs pyarrow."),
    cloud: str = typer.Option(
        "",
        help="Instead of policies, what a waiting budget buys where jobs may go to the cloud: usd_per_gpu_h=2.5, and "
        "max_queue=30 for a bound on the queue; see docs/admin/bursting.md.",
    ),
    as_json: bool = typer.Option(False, "--json", help="The summary as one JSON object, and nothing else."),
) -> None:
    """Run jobs on a simulated cluster and say how they fare. Ctrl-C stops and leaves what was computed so far."""
    from penstock_scheduler.cli import simulation  # not sooner: it takes seconds

    simulation.run(
        cluster=cluster,
        workload=workload,
        policy=policy,
        stages=stage,
        profiles=profiles,
        seeds=seeds,
        out=out,
        config=config,
        trace=trace,
        sensitivities=sensitivities,
        gpu_types=gpu_types,
        gpu_speeds=gpu_speeds,
        prices=prices,
        disturb=disturb,
        unprofiled=unprofiled,
        pairs=pairs,
        pair_types=pair_types,
        draw_kinds=draw_kinds,
        agents=agents,
        assume_utilisation=assume_utilisation,
        parquet=parquet,
        cloud=cloud,
        as_json=as_json,
    )
