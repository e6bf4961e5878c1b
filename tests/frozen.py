"""Imported last by the process that forks others (`tests.forking`): their garbage collections leave out what it has imported."""

import gc

gc.collect()
gc.freeze()
