"""The recipe for Lightning on several nodes with a device each: ``torchrun ... lightning_on_nodes.py NODES FOLDER``."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning_metrics

recipe: Any = lightning_metrics
recipe.Trainer = partial(recipe.Trainer, num_nodes=int(sys.argv[1]))
recipe.main(1, Path(sys.argv[2]))
