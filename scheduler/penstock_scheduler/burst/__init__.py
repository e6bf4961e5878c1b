"""Deciding what runs in the cloud: waiting policies, estimates, offers, budgets. Pure; nothing here reaches a cloud.

What launches instances is behind the port `penstock_scheduler.ports.Burst`; docs/admin/bursting.md explains.
"""
