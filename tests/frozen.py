"""Imported last by the process that tests fork ranks and workers from: what it holds by then is left to all of them.

The garbage collector no longer looks at these objects. That saves the time, and the copies that looking makes of
memory which processes share.
"""

import gc

gc.collect()
gc.freeze()
