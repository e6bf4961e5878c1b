"""Adaptive GPU jobs as Airflow tasks: reserved for the provider, which is not written yet.

The distribution exists so that the workspace, the imports and the packaging are settled before its first operator.
"""
