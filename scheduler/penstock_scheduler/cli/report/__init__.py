"""An HTML report of what happened on one cluster, or on several clusters that ran the same jobs."""

from penstock_scheduler.cli.report.html import render_page
from penstock_scheduler.people.drawing.history import History, JobHistory, NodeShape, Span

__all__ = ["History", "JobHistory", "NodeShape", "Span", "render_page"]
