"""A round: observe, decide by a policy, check the plan, act on the difference, and explain it."""
