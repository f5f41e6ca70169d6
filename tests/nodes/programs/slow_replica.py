"""A replica of docs/examples, whose steps take so long that a node can come back: ``slow_replica.py FOLDER NAME``."""

import sys
from pathlib import Path

import torchft_replicas as example

example.STEP_S = 0.8
example.main(Path(sys.argv[1]), sys.argv[2], example.make_loader())
