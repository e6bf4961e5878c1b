"""Penstock under attack: what users, liars, archives and odd names do to it. README.md in this folder is the threat model."""
