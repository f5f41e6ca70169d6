"""Python imports this when it starts, where ``run_command`` says so: ranks of torchrun then become unlike twins.

A rank that torchrun has just started has the server of its number fork the process that runs its script. torchrun
itself is forked from the first one, which has imported torch.
"""

import os
import sys

if "TWINS" in os.environ:
    import twin_rank

    if "RANK" in os.environ:
        twin_rank.hand_over(sys.orig_argv[sys.orig_argv.index("-u") + 1 :])  # torchrun starts: python -u SCRIPT ...
    elif [os.path.basename(path) for path in sys.orig_argv[1:2]] == ["torchrun"]:
        twin_rank.hand_over(sys.orig_argv[1:])
