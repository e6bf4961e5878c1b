"""What keeps penstockd and its users safe from bad input: child processes, folders, credentials, health."""
