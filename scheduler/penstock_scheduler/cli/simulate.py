"""`penstock simulate run`: what would have happened to these jobs on this cluster, under these policies?

Only the options are here, so that `--help` is quick; `simulation` has what they do. `penstock simulate whatif` has the options
about jobs that share GPUs, too.
"""

from __future__ import annotations

from pathlib import Path

import typer

from penstock_scheduler.cli.options import POLICIES, STAGE

PAIRS = typer.Option(
    None,
    help="For policies that let jobs share GPUs: a table of the speed that jobs lose beside each other. "
    "Without it, `whatif` uses what the site has learned. See docs/admin/simulator.md.",
)
PAIR_TYPES = typer.Option(
    "", help="For --pairs: which type of the table to use for a type of the cluster, such as t4=p100,a100=v100."
)
DRAW_KINDS = typer.Option(
    False,
    help="For --pairs: give a job of a kind that is not in the table a random kind that runs on as many GPUs.",
)
AGENTS = typer.Option("", help="What sharing costs, such as switch_s=1,noise=0.03.")
ASSUME_UTILISATION = typer.Option(
    None,
    min=0.0,
    max=1.0,
    help="Share of a GPU that a job uses when it runs alone, for jobs without a known share. Default: 1, all of it.",
)


def simulate_command(
    cluster: str = typer.Option(..., help="The nodes: a spec such as t4:6x4,rtx:3x8, or a file with one part a line."),
    workload: Path = typer.Option(..., help="The jobs: a workload, or a trace; see docs/admin/workloads.md."),
    policy: str | None = POLICIES,
    stage: list[str] = STAGE,
    profiles: Path | None = typer.Option(None, help="Folder of measured tables, for the models of the workload."),
    seeds: int = typer.Option(
        1,
        min=1,
        help="Number of simulations of each policy, each with other random numbers; see docs/admin/simulator.md.",
    ),
    out: Path | None = typer.Option(None, help="Folder for report, tables and summary."),
    config: Path | None = typer.Option(
        None,
        help="A settings file: its settings of the policies apply, and its policy decides if there is no --policy.",
    ),
    trace: str | None = typer.Option(
        None, "--format", help="Format of the workload. Default: detected from its first line."
    ),
    sensitivities: Path | None = typer.Option(
        None, help="Folder of profiles of CPU and memory; see docs/admin/synergy.md."
    ),
    gpu_types: str = typer.Option("", help="GPU types that the catalogue lacks, such as mi50,k40."),
    gpu_speeds: str = typer.Option(
        "", help="Relative speeds of GPU types, for jobs with recorded durations, such as a100=1,h100=2."
    ),
    prices: str = typer.Option("", help="Prices of a GPU-hour, such as t4=0.4,a100=2.5."),
    disturb: str = typer.Option("", help="Faults to simulate, such as node_mtbf_h=500,estimation_error=0.1."),
    unprofiled: bool = typer.Option(
        False, help="Jobs have no profile of their speed before they run; sia measures them in their first rounds."
    ),
    pairs: Path | None = PAIRS,
    pair_types: str = PAIR_TYPES,
    draw_kinds: bool = DRAW_KINDS,
    agents: str = AGENTS,
    assume_utilisation: float | None = ASSUME_UTILISATION,
    parquet: bool = typer.Option(False, help="Write the tables as Parquet, not CSV; needs pyarrow."),
    cloud: str = typer.Option(
        "",
        help="A cloud behind the site: usd_per_gpu_h=2.5, and keys of the section `cloud` such as wait=compute-wait or "
        "max_queue=30; see docs/admin/bursting.md.",
    ),
    frontier: bool = typer.Option(
        False, "--frontier", help="With --cloud: compare waiting budgets, cost against completion time."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print only the summary, as one JSON object."),
) -> None:
    """Run jobs on a simulated cluster and compare policies. Ctrl-C stops and keeps what was computed so far."""
    from penstock_scheduler.cli import simulation  # imported late: it takes seconds

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
        frontier=frontier,
        as_json=as_json,
    )
