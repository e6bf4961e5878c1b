"""Bursting to the cloud (Starburst): reserved for the waiting policies and EC2, which are not written yet.

The package exists so that the import rules and the packaging are settled before its first module.
"""
