"""Jobs that share a GPU: who gets how much of it, from what they report. Pure: the node agent and the simulator run
it."""
