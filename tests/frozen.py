"""Imported last by the process that tests fork ranks and workers from: what it holds by then is left to all of them.

The garbage collector no longer looks at these objects. That saves the time, and the copies that looking makes of
memory which processes share.

A fork also copies what maps the memory. So modules of tests import what is large where they use it, not when they are
collected: each process that runs tests collects all of them, and forks thousands of workers.
"""

import gc

import torch.utils.data._utils

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0  # as in conftest.py: of the workers of ranks, too

gc.collect()
gc.freeze()
