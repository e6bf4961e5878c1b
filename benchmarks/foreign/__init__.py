"""Training scripts that others wrote, made elastic by a few changed lines: what was changed, and that it works."""
