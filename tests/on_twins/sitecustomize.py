"""Python imports this when it starts, where ``run_command`` says so: ranks of torchrun then become unlike twins.

A rank that torchrun has just started has the server of its number fork the process that runs its script.
"""

import os
import sys

if {"RANK", "TWINS"} <= {*os.environ}:
    import twin_rank

    twin_rank.hand_over(sys.orig_argv[sys.orig_argv.index("-u") + 1 :])  # torchrun starts: python -u SCRIPT ...
