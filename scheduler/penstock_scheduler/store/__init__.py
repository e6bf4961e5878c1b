"""The store: rounds, jobs, reports, the ledger, and all else that must survive a restart; and the spool."""
