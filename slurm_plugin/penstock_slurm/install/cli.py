"""`penstock slurm`: install Penstock's parts into the Slurm of this machine, check them, and remove them.

The steps that `penstock slurm install` leaves to the admin: it edits no Lua of the site's, starts no service, and reaches no
other host.
"""

from __future__ import annotations

import functools
import pwd
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.settings import load_settings
from penstock_slurm.install import changes as files
from penstock_slurm.install import plan, units
from penstock_slurm.install.agents import check_agents, to_do_on_nodes, to_undo_on_nodes
from penstock_slurm.install.answers import Finding, check_answers, check_test_jobs
from penstock_slurm.install.checks import check_files, check_jobs, check_power_saving, submit_test_job, waiting_jobs
from penstock_slurm.install.real_job import check_real_job
from penstock_slurm.install.site_shape import check_site_shape
from penstock_slurm.install.units import DAEMON, build_plugin

app = typer.Typer(
    help="sbatch's adaptive flags and the nodes' agents: install, check and remove them.", no_args_is_help=True
)

Config = Annotated[Path, typer.Option("--config", help="The settings file.")]
CONFIG = Path("/etc/penstock/penstock.toml")
User = Annotated[str | None, typer.Option(help="Submit the test jobs as this user, if root may not submit jobs.")]
Apply = Annotated[bool, typer.Option("--apply", help="Make the changes. Without this option they are only shown.")]


@app.command()
def sync(
    config: Config = CONFIG,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing unless there is an error.")] = False,
) -> None:
    """Write what job_submit.lua reads: the partitions, GPU types and model families, and when new jobs are expected to start."""
    site = plan.open_site(load_settings(config))
    text = plan.site_text(site)
    changed = not site.site_file.exists() or site.site_file.read_text() != text
    try:
        if changed:
            files.write(site.site_file, text.encode())
        files.write(site.starts_file, plan.starts_text(site).encode())
    except OSError as error:
        raise PenstockError(f"{error.filename}: {error.strerror}; run this as root") from None
    if not quiet:
        typer.echo(f"{site.site_file} {'was written' if changed else 'is up to date'}")


@app.command()
def install(
    config: Config = CONFIG,
    prefix: Annotated[Path, typer.Option(help="The folder for penstock.so.")] = Path("/usr/local/lib/penstock"),
    plugin: Annotated[Path | None, typer.Option(help="Use this penstock.so instead of building it.")] = None,
    slurm_cflags: Annotated[
        str, typer.Option(help="Compiler options for Slurm's headers, such as -I/opt/slurm/include.")
    ] = "",
    schedule: Annotated[
        plan.Schedule | None, typer.Option(help="What repeats `sync`.  (default: systemd if it runs, or else cron)")
    ] = None,
    schedule_dir: Annotated[Path | None, typer.Option(hidden=True)] = None,
    user: User = None,
    apply: Apply = False,
) -> None:
    """Add the adaptive flags to sbatch: show the changes to Slurm's files, or make and test them with --apply."""
    site = plan.open_site(load_settings(config))
    kind = schedule or (plan.Schedule.SYSTEMD if Path("/run/systemd/system").is_dir() else plan.Schedule.CRON)
    timer = plan.schedule_changes(kind, schedule_dir, config)
    library = plugin.read_bytes() if plugin is not None else build_plugin(slurm_cflags)
    wanted = plan.changes(site, library, prefix.absolute(), timer, config)
    for change in wanted:
        typer.echo(change.diff())
    if not wanted:
        typer.echo("nothing to change")
    elif apply:
        files.apply(wanted, site.record)
        _reconfigure(site)
        typer.echo(f"made {len(wanted)} changes, recorded in {site.record}")
    try:
        if apply:
            typer.echo("")
            _report(site, user, jobs=True, on_nodes=False)  # the nodes are installed after this host
    finally:
        typer.echo("\nleft to do by hand:")
        for step in left_to_do(site, prefix.absolute(), config, timer=kind is plan.Schedule.SYSTEMD):
            typer.echo(f"- {step}")
    if wanted and not apply:
        typer.echo("\nnothing was changed; --apply makes these changes, keeps backups, and submits test jobs")


@app.command()
def check(
    config: Config = CONFIG,
    user: User = None,
    jobs: Annotated[bool, typer.Option(help="Also submit test jobs, which never start.")] = True,
    submit: Annotated[
        bool, typer.Option("--submit", help="Run a job on one GPU, too, and wait for its report. penstockd must run.")
    ] = False,
) -> None:
    """Check Slurm's answers, sbatch's flags and the nodes' agents, and print a remedy for each failure.

    The exit status is 1 if a check fails.
    """
    _report(plan.open_site(load_settings(config)), user, jobs=jobs, on_nodes=True, real=submit)


@app.command()
def uninstall(config: Config = CONFIG, apply: Apply = False) -> None:
    """Restore Slurm's files: show the changes, or make them with --apply."""
    site = plan.open_site(load_settings(config))
    undos = files.plan_undo(site.record)
    ours = {step.path for step in undos if step.after is None}
    if site.job_submit not in ours and site.job_submit.exists() and not plan.own_lua_lacks_ours(site):
        raise PenstockError(
            f"{site.job_submit} is the site's own and calls penstock.lua: remove those lines first, or slurmctld could not "
            "load it"
        )
    for step in undos:
        if step.after is None:
            typer.echo(f"delete {step.path}")
        else:
            typer.echo(files.Change(step.path, step.after).diff())
        typer.echo(step.message, nl=False)
    if waiting := waiting_jobs(site):
        typer.echo(f"these jobs would wait forever: {' '.join(job.id for job in waiting)}")
        typer.echo("stop penstockd, then release or cancel them: scontrol release JOB, scancel JOB")
        if shared := [job.id for job in waiting if job.gpus_per_node is None]:
            typer.echo(f"these have shared GPUs and ask Slurm for none: {' '.join(shared)}")
            typer.echo(
                "before you release them: scontrol update JobId=JOB TresPerNode=gres:gpu:N, or they start on GPUs of other jobs"
            )
    for line in (*to_undo_on_nodes(site), *files.timers(undos)):
        typer.echo(line)
    if not apply:
        typer.echo("nothing was changed; --apply does this")
        return
    conf = Path(site.config["SLURM_CONF"])
    # slurmctld must stop using the files before they are deleted.
    files.carry_out([step for step in undos if step.path == conf], site.record)
    _reconfigure(site)
    site.starts_file.unlink(missing_ok=True)
    files.carry_out([step for step in undos if step.path != conf], site.record)
    typer.echo("Slurm's files are restored; remove penstock.so and its plugstack line from the other hosts")


@app.command()
def unit(
    name: Annotated[
        str,
        typer.Argument(
            help="penstockd.service, penstock-api.service, penstock-api.socket, penstock-agent.service or run-penstock.mount."
        ),
    ],
    config: Config = CONFIG,
    constrain_devices: Annotated[
        bool,
        typer.Option(
            "--constrain-devices", help="For ConstrainDevices=yes in cgroup.conf: the agent may open GPUs in cgroups."
        ),
    ] = False,
) -> None:
    """Print a systemd unit with the site's paths."""
    settings = load_settings(config)
    of_nodes = units.agent_units(settings, config, constrained=constrain_devices)
    of_api = units.api_units(settings, config)
    known = {units.DAEMON: units.daemon_unit(config)} | of_api | of_nodes
    if name in (units.API, units.API_SOCKET) and not of_api:
        raise PenstockError(
            f"{name} is for [api] embedded = false, and for the user that it names; set both in {config}"
        )
    if name not in known:
        raise PenstockError(f"there is no unit {name!r} for these settings; the units are {', '.join(known)}")
    typer.echo(known[name], nl=False)


def _reconfigure(site: plan.InstallTarget) -> None:
    done = site.commands.run("scontrol", "reconfigure")
    if done.returncode != 0:
        raise PenstockError(f"the files are changed, but `scontrol reconfigure` failed: {done.stderr.strip()}")


def _report(site: plan.InstallTarget, user: str | None, *, jobs: bool, on_nodes: bool, real: bool = False) -> None:
    try:
        uid = None if user is None else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise PenstockError(f"there is no user {user!r} on this machine") from None
    site = plan.open_site(site.settings)  # again, because slurmctld may have been reconfigured
    findings: list[Finding] = []

    def show(more: Iterable[Finding]) -> None:
        for finding in more:
            typer.echo(f"{'FAILED' if finding.remedy else 'ok':8}{finding.what}")
            if finding.remedy:
                typer.echo(f"        {finding.remedy}")
            findings.append(finding)

    show(check_answers(site))
    if jobs:
        show(check_test_jobs(site, functools.partial(submit_test_job, site, uid)))
    show(check_files(site))
    show(check_site_shape(site))
    show(check_power_saving(site))
    if jobs and not any(finding.remedy for finding in findings):
        show(check_jobs(site, uid))
    show(check_agents(site, on_nodes=on_nodes))
    if real:
        show(check_real_job(site, functools.partial(submit_test_job, site, uid)))
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)


OWN_LUA = """add to the site's own {lua}:
    local penstock = dofile("{module}")                      -- at its top
    return penstock.job_submit(job, partitions, uid)         -- slurm_job_submit: in place of its `return slurm.SUCCESS`
    return penstock.job_modify(job, record, partitions, uid) -- slurm_job_modify: in place of its `return slurm.SUCCESS`
  slurmctld reads the file again once its modification time differs by a second"""


def left_to_do(site: plan.InstallTarget, prefix: Path, settings_file: Path, *, timer: bool) -> Iterator[str]:
    """The steps in their order, with this site's paths; the last one tells whether the site is complete.

    Args:
        prefix: the folder that has penstock.so in it.
        timer: whether a systemd timer repeats `sync`.
    """
    if plan.own_lua_lacks_ours(site):
        yield OWN_LUA.format(lua=site.job_submit, module=site.module)
    if timer:
        yield "systemctl daemon-reload && systemctl enable --now penstock-sync.timer"
    config = f" --config {settings_file}"
    if not site.settings.section(ApiSettings).socket.is_socket():
        yield (
            f"start penstockd: penstock slurm unit {DAEMON}{config} >/etc/systemd/system/{DAEMON} && systemctl daemon-reload && "
            "systemctl enable --now penstockd"
        )
    yield (
        f"copy {prefix / 'penstock.so'} to the other hosts with sbatch, then the line in {site.plugstack}; nodes need both for "
        "jobs with one task for each GPU"
    )
    yield f"on each node of the managed partitions: mount {site.slurm.spool_dir} of this host at the same path"
    if site.slurm.agents:
        yield to_do_on_nodes(site, prefix, settings_file)
    yield f"penstock slurm check --submit --user NAME{config}: it runs a job as that user and names the first step that fails"
