"""The steps that `penstock slurm install` leaves to the admin: it edits no Lua of the site's, starts no service, and reaches no
other host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_slurm.install import plan
from penstock_slurm.install.agents import to_do_on_nodes
from penstock_slurm.install.units import DAEMON

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
