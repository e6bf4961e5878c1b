"""What pages, reports and the terminal draw alike: the colours of jobs."""
