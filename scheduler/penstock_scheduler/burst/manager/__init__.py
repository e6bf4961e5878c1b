"""Launches, watches and ends the instances of jobs in the cloud. docs/admin/bursting.md explains what it promises."""
