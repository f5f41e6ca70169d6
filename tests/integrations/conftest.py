"""What tests of frameworks need before the first one."""

import multiprocessing

from quick import OF_RANKS

# What most ranks import here, each for seconds, if the process that they are forked from has not done so.
FRAMEWORKS = ["transformers.trainer", "lightning.pytorch", "ignite.distributed", "ignite.engine", "torchdata"]
multiprocessing.set_forkserver_preload([*FRAMEWORKS, *OF_RANKS])
