"""The HTTP service of penstockd: docs/api.md has its contract, `penstock_scheduler.messages` its bodies."""
