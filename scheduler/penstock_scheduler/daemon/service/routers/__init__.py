"""The endpoints, by what they are about. docs/user/api.md lists all of them with the role that each needs."""

from penstock_scheduler.daemon.service.routers import (
    admin,
    cluster,
    events,
    health,
    history,
    jobs,
    ledger,
    models,
    sessions,
    whatif,
)

ROUTERS = tuple(
    each.router for each in (health, jobs, cluster, admin, models, ledger, history, events, sessions, whatif)
)
