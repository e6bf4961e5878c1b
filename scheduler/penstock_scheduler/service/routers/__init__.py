"""The endpoints, by what they are about. docs/user/api.md lists all of them with the role that each needs."""

from penstock_scheduler.service.routers import admin, cluster, events, health, history, jobs, ledger

ROUTERS = (health.router, jobs.router, cluster.router, admin.router, ledger.router, history.router, events.router)
