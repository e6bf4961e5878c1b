"""The programs that run all the time: penstockd (`penstockd`) and its HTTP service (`service`)."""
