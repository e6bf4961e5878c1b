"""The HTTP service of penstockd: docs/user/api.md has its contract, `penstock_scheduler.api.messages` its bodies."""
