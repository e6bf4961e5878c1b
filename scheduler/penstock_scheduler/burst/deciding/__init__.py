"""Decides what runs in the cloud: waiting policies, estimates, offers, budgets. Pure: nothing here connects to a cloud.

The port `penstock_scheduler.api.ports.Burst` launches instances. docs/admin/bursting.md explains the rules.
"""
