"""Co-located jobs on one node: which of them run, and how much of a GPU each gets. Pure: the agent and the simulator
run it."""
