"""An HTML report of what happened on one cluster, or on several clusters that ran the same jobs."""

from penstock_scheduler.drawing.history import History, JobHistory, NodeShape, Span
from penstock_scheduler.report.html import render_page

__all__ = ["History", "JobHistory", "NodeShape", "Span", "render_page"]
