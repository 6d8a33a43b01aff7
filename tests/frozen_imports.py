"""Hides what was imported so far from the garbage collector: the last import of a server.

Each collection of a process that it forks would walk over the modules of torch, and copy their
pages. They reference no tensor but constants of `emulated_cuda`.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # libraries report what is still there at the end of the process
