"""What pages, reports and the terminal draw alike: one style, the colours of jobs, line charts and the Gantt chart."""
