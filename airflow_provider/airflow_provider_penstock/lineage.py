"""Links between a job and its task's run in OpenLineage, if Airflow has the OpenLineage provider."""

from __future__ import annotations

from typing import Any


def parent_environment(ti: Any) -> dict[str, str]:
    """Environment variables that make the task's run the parent of what the job reports to OpenLineage."""
    try:
        from airflow.providers.openlineage import conf
        from airflow.providers.openlineage.plugins import macros
    except ImportError:
        return {}
    if conf.is_disabled():
        return {}
    return {
        "OPENLINEAGE_PARENT_ID": macros.lineage_parent_id(ti),
        "OPENLINEAGE_ROOT_PARENT_ID": macros.lineage_root_parent_id(ti),
    }


def facets(base_url: str, job_id: str | None) -> Any:
    """An `OperatorLineage` that names the job in penstockd; None without OpenLineage."""
    try:
        from airflow.providers.openlineage.extractors.base import OperatorLineage
        from openlineage.client.facet_v2 import external_query_run
    except ImportError:
        return None
    if job_id is None:
        return OperatorLineage()
    facet = external_query_run.ExternalQueryRunFacet(externalQueryId=job_id, source=base_url)
    return OperatorLineage(run_facets={"externalQuery": facet})
