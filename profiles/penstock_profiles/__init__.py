"""How fast a job runs on what: throughput, efficiency and goodput models, and the messages that jobs send about it."""
