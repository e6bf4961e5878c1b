"""Penstock's `sia` inside the simulator that Sia's authors published: `__main__` says how to run it."""
