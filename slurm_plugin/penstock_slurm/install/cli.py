"""`penstock slurm`: attach Penstock to the Slurm of this machine, check it, and take it off again."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from penstock_scheduler.errors import PenstockError
from penstock_scheduler.settings import load_settings
from penstock_slurm.install import changes as files
from penstock_slurm.install import plan, units
from penstock_slurm.install.agents import check_agents, to_do_on_nodes, to_undo_on_nodes
from penstock_slurm.install.checks import check_files, check_jobs, waiting_jobs
from penstock_slurm.install.findings import Finding
from penstock_slurm.install.sources import build_plugin, source

app = typer.Typer(
    help="sbatch's adaptive flags and the nodes' agents: install, check and remove them.", no_args_is_help=True
)

Config = Annotated[Path, typer.Option("--config", help="The settings file.")]
CONFIG = Path("/etc/penstock/penstock.toml")
User = Annotated[str | None, typer.Option(help="Submit the test jobs as this user, where root may not submit any.")]
Apply = Annotated[bool, typer.Option("--apply", help="Do it; without, only show it.")]


@app.command()
def sync(
    config: Config = CONFIG, quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing if all is well.")] = False
) -> None:
    """Write the list of partitions, GPU types and model families that job_submit.lua goes by."""
    site = plan.open_site(load_settings(config))
    text = plan.site_text(site)
    changed = not site.site_file.exists() or site.site_file.read_text() != text
    if changed:
        try:
            files.write(site.site_file, text.encode())
        except OSError as error:
            raise PenstockError(f"{error.filename}: {error.strerror}; run this as root") from None
    if not quiet:
        typer.echo(f"{site.site_file} {'was written' if changed else 'is up to date'}")


@app.command()
def install(
    config: Config = CONFIG,
    prefix: Annotated[Path, typer.Option(help="Where penstock.so goes.")] = Path("/usr/local/lib/penstock"),
    plugin: Annotated[Path | None, typer.Option(help="A penstock.so that is built already.")] = None,
    slurm_cflags: Annotated[str, typer.Option(help="Where Slurm's headers are, such as -I/opt/slurm/include.")] = "",
    schedule: Annotated[
        plan.Schedule | None, typer.Option(help="What repeats `sync`.  (default: systemd where it runs, or cron)")
    ] = None,
    schedule_dir: Annotated[Path | None, typer.Option(hidden=True)] = None,
    user: User = None,
    apply: Apply = False,
) -> None:
    """Show the changes to Slurm's files that give sbatch the flags; with --apply make them and test them."""
    site = plan.open_site(load_settings(config))
    kind = schedule or (plan.Schedule.SYSTEMD if Path("/run/systemd/system").is_dir() else plan.Schedule.CRON)
    timer = plan.schedule_changes(kind, schedule_dir, config)
    library = plugin.read_bytes() if plugin is not None else build_plugin(slurm_cflags)
    wanted = plan.changes(site, library, prefix.absolute(), timer, config)
    for change in wanted:
        typer.echo(change.diff())
    if plan.own_lua_lacks_ours(site):
        typer.echo(
            f"{site.job_submit} is the site's own and does not call ours: add the lines that\n"
            f'{source("lua") / "job_submit.lua"} shows, with dofile("{site.module}")\n'
        )
    if not wanted:
        typer.echo("nothing to change")
    elif not apply:
        typer.echo("nothing was changed; --apply makes these changes, keeps what was there, and submits test jobs")
        return
    else:
        files.apply(wanted, site.record)
        _reconfigure(site)
        typer.echo(f"made {len(wanted)} changes, recorded in {site.record}")
        if kind is plan.Schedule.SYSTEMD:
            typer.echo("start the timer: systemctl daemon-reload && systemctl enable --now penstock-sync.timer")
    if apply:
        typer.echo(f"copy {prefix / 'penstock.so'} and the line in {site.plugstack} to all hosts with sbatch")
        if site.slurm.agents:
            typer.echo(to_do_on_nodes(site, prefix.absolute()))
        typer.echo("")
        _report(site, user, jobs=True, on_nodes=False)  # they come after this host


@app.command()
def check(
    config: Config = CONFIG,
    user: User = None,
    jobs: Annotated[bool, typer.Option(help="Submit test jobs that never start.")] = True,
) -> None:
    """Say whether the flags work here, and the agents of the nodes, with remedies. Exit status 1 if anything is wrong."""
    _report(plan.open_site(load_settings(config)), user, jobs=jobs, on_nodes=True)


@app.command()
def uninstall(config: Config = CONFIG, apply: Apply = False) -> None:
    """Show how to put Slurm's files back as they were; with --apply do it."""
    site = plan.open_site(load_settings(config))
    undos = files.plan_undo(site.record)
    ours = {step.path for step in undos if step.after is None}
    if site.job_submit not in ours and site.job_submit.exists() and not plan.own_lua_lacks_ours(site):
        raise PenstockError(
            f"{site.job_submit} is the site's own and calls penstock.lua: take those lines out first, or slurmctld would "
            "find a job_submit.lua that does not load"
        )
    for step in undos:
        if step.after is None:
            typer.echo(f"delete {step.path}")
        else:
            typer.echo(files.Change(step.path, step.after).diff())
        typer.echo(step.told, nl=False)
    if waiting := waiting_jobs(site):
        typer.echo(f"jobs that wait for Penstock, and would wait for ever: {' '.join(job.id for job in waiting)}")
        typer.echo("release or cancel them when penstockd is stopped: scontrol release JOB, scancel JOB")
        if shared := [job.id for job in waiting if job.gpus_per_node is None]:
            typer.echo(f"these have no GPUs in Slurm any more, for they shared some: {' '.join(shared)}")
            typer.echo(
                "before release: scontrol update JobId=JOB TresPerNode=gres:gpu:N; else they start on GPUs of others"
            )
    for line in to_undo_on_nodes(site):
        typer.echo(line)
    if not apply:
        typer.echo("nothing was changed; --apply does this")
        return
    conf = Path(site.config["SLURM_CONF"])
    # slurmctld lets go of the files before they go.
    files.take_back([step for step in undos if step.path == conf], site.record)
    _reconfigure(site)
    files.take_back([step for step in undos if step.path != conf], site.record)
    typer.echo("Slurm's files are as they were; take penstock.so and its plugstack line off the other hosts")


@app.command()
def unit(
    name: Annotated[str, typer.Argument(help="penstockd.service, penstock-agent.service or run-penstock.mount")],
    config: Config = CONFIG,
    constrain_devices: Annotated[
        bool,
        typer.Option(
            "--constrain-devices", help="cgroup.conf has ConstrainDevices=yes: the agent opens GPUs in cgroups"
        ),
    ] = False,
) -> None:
    """Print a systemd unit with this site's paths."""
    of_nodes = units.agent_units(load_settings(config), config, constrained=constrain_devices)
    known = {units.DAEMON: units.daemon_unit(config)} | of_nodes
    if name not in known:
        raise PenstockError(f"there is no unit {name!r} for these settings; there are {', '.join(known)}")
    typer.echo(known[name], nl=False)


def _reconfigure(site: plan.InstallTarget) -> None:
    done = site.commands.run("scontrol", "reconfigure")
    if done.returncode != 0:
        raise PenstockError(f"the files are changed, but `scontrol reconfigure` failed: {done.stderr.strip()}")


def _report(site: plan.InstallTarget, user: str | None, *, jobs: bool, on_nodes: bool) -> None:
    try:
        uid = None if user is None else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise PenstockError(f"there is no user {user!r} on this machine") from None
    site = plan.open_site(site.settings)  # anew: slurmctld may just have been reconfigured
    findings: list[Finding] = []

    def tell(more: Iterable[Finding]) -> None:
        for finding in more:
            typer.echo(f"{'FAILED' if finding.remedy else 'ok':8}{finding.what}")
            if finding.remedy:
                typer.echo(f"        {finding.remedy}")
            findings.append(finding)

    tell(check_files(site))
    if jobs and not any(finding.remedy for finding in findings):
        tell(check_jobs(site, uid))
    tell(check_agents(site, on_nodes=on_nodes))
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)
