"""The agent of a node, `penstock-agent`: lets jobs share GPUs there as the daemon has ordered
(docs/admin/sharing.md)."""
